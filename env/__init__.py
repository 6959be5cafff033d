"""Environments: the batch that steps episodes, and scalar and vector environments over it."""
