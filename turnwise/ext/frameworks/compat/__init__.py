"""Compatibility with agents and hooks written for verl and Agent-Lightning."""
