"""Scores as pure functions of an episode log."""
