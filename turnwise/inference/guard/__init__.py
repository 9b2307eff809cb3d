"""What stands before the routes of servers, also in vLLM's and SGLang's own Python, where this package is not."""
