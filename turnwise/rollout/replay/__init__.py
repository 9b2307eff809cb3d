"""The replay buffer: holds finished groups and chooses which ones a train step learns from."""
