"""The replay buffer: which finished groups a train step learns from, and where they wait."""
