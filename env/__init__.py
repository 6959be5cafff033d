"""Environments: the batch that steps episodes, scalar and vector environments over it, and environment families."""
