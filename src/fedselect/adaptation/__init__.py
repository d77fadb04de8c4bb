"""A model for a client that was not there: from what a finished run shares, and the client's own few samples."""

EPOCHS = (1, 3, 10, 30)
"""Passes of fine-tuning to try."""
