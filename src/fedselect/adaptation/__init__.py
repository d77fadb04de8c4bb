"""A model for a new client, made from what a finished run shares and a few samples of the client."""

EPOCHS = (1, 3, 10, 30)
"""Numbers of fine-tuning epochs to try."""
