"""The serving fleet as an environment family."""
