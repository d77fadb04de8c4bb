"""Secure aggregation: the server learns sums over clients, but no client's values or mask."""
