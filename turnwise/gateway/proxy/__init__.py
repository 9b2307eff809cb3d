"""The gateway in front of a hosted endpoint: requests are passed on, and conversations are recorded as text."""
