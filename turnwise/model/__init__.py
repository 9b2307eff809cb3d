"""The contracts between rollouts and models: clients, replicas, renderers, and the canonical form of messages."""
