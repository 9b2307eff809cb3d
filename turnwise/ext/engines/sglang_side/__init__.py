"""What runs in SGLang's own Python: it is started by path, and imports nothing of this package."""
