"""Comparison of the simulator with measured runs and with the discrete-event reference."""
