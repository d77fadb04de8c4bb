"""Experiments: configurations, run directories, comparisons, tables and reports."""
