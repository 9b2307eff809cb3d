"""Chat templates and formats: from messages to token ids, and from sampled ids back to messages."""
