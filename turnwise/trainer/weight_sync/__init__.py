"""How new weights reach the inference servers."""
