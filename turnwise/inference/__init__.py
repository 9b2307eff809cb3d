"""Inference: messages to tokens and back, the recorder, clients and the built-in server.

Nothing is imported here: a part is imported from its own file, so that using the recorder costs no torch.
"""
