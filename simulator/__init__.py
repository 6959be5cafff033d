"""Measured data, lookup table and serving dynamics."""
