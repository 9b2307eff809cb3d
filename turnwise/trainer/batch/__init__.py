"""From finished groups to training rows: rewards, advantages, value targets."""
