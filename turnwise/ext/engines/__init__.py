"""Inference engines that plug in, each with what runs in the engine's own Python."""
