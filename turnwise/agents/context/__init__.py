"""What becomes of a conversation that outgrows the model's context: old results are dropped, it is summarised, or parts
of the work are given to sub-agents. Each begins a branch in the episode's session, with a reason of its own.
"""
