"""What is put beside a repository while its tests run: a plugin of pytest that reports what it saw."""
