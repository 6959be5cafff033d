"""Simulator: lookup tables, offered load, serving dynamics and what-if questions."""
