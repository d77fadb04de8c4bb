"""Reproduce the paper's tables and figures: run what is missing, and show our numbers beside the paper's."""
