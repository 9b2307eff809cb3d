"""Code that runs inside vLLM's own Python, where this package is not installed."""
