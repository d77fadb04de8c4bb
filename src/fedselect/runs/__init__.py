"""Runs in directories: configurations, the runner, tables, trackers and export."""
