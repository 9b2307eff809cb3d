"""The gateway: OpenAI and Anthropic wire APIs for external agents, on top of recorded sessions."""
