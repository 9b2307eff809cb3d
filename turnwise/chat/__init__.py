"""Chat templates and chat formats: messages to token ids, and sampled ids back to messages."""
