"""What runs inside vLLM's own Python, where this package is not installed.

Owns: the server's process (``turnwise_vllm_serve.py``) and what its workers do differently
(``turnwise_vllm_worker.py``). Refuses: imports of this package; vLLM, torch and the standard library are all that there
is. Their directory is what vLLM's Python is shown of it.
"""
