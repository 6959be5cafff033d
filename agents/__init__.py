"""Agents: policies from naive to learned, their search, training, evaluation and comparison on recorded logs."""
