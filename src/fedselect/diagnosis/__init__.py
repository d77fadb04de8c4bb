"""Diagnose how clients differ: train one shared model for a few rounds, then report a table, a picture and sentences."""
