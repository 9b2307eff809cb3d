"""Inference clients and replicas: HTTP client, built-in and vLLM servers, scripted model.

Imports nothing, so that using the client costs no torch.
"""
