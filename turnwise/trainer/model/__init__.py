"""The models of a trainer: policy, critic, reference, adapters, and their packed attention."""
