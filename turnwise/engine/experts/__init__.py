"""Experts of mixture models: their routers, and what these chose for each token."""
