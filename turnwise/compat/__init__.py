"""Agents and hooks that were written for verl and Agent-Lightning, unchanged."""
