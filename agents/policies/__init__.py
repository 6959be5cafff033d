"""Policies: rules, constants, switching policies, planners, networks and language models."""
