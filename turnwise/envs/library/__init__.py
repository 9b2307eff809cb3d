"""The environments that ship."""
