"""The built-in inference server: continuous batching over one packed forward per step."""
