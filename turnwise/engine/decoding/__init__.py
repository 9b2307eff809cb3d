"""Decoding steps that are recorded once and repeated by a GPU."""
