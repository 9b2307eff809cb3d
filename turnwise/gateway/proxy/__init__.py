"""The proxy gateway for a hosted endpoint: requests are forwarded, conversations recorded as text."""
