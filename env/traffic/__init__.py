"""The traffic controller as an environment."""
