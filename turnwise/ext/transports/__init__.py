"""Weight transports that plug in."""
