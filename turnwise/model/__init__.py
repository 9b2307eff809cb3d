"""The contracts between rollouts and inference: LLM client, replica, renderer, and the canonical form of messages."""
