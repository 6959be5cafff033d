"""Discrete-event engine: simulates every request and iteration of a fleet individually."""
