"""Recorded episodes played again: replays that find differences, and bisections that find the turn that decided."""
