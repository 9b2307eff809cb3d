"""Models of the trainer: policy, critic, reference, adapters, and their packed attention."""
