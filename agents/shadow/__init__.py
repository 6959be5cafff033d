"""Comparison of policies on a user's own request log."""
