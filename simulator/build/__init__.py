"""Offline: measured operator times -> step model -> discrete-event engine -> lookup table -> validation."""
