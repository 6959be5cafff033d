"""Simulator: lookup tables, offered load, serving dynamics, what-if questions, the traffic controller's server."""
