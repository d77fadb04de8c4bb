"""Exported models: self-describing files, and predictions with them."""

from fedselect.serve.served import Served, load_model

__all__ = ["Served", "load_model"]
