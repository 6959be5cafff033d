"""Readers of request logs and benchmark files."""
