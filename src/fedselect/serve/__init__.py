"""Models that leave a run: files that say what they take and what their outputs mean, and predictions with them."""

from fedselect.serve.served import Served, load_model

__all__ = ["Served", "load_model"]
