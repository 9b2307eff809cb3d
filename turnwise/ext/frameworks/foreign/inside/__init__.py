"""Drivers of foreign frameworks and the worker that runs them; no imports from Turnwise, Python 3.10 or newer."""
