"""Policies, from naive to learned, and their evaluation."""
