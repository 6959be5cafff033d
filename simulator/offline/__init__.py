"""Builders of lookup tables: from operator times, or fitted to a measured engine."""
