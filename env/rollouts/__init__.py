"""Agent sessions on one engine as an environment."""
