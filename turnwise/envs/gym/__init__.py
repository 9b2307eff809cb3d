"""Adapters to and from Gymnasium environments."""
