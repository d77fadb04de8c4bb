"""Search for the best method and settings on validation data, dropping weak settings early."""
