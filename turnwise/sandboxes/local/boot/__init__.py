"""Programs of the local backend that run without the package: only the standard library, and only these files."""
