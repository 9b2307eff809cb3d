"""Where metrics go: always a file of JSON lines and a console, and what ``loggers`` of a configuration names beside."""
