"""Secure aggregation: a server that learns sums over clients, and neither a client's values nor its mask."""
