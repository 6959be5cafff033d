"""Fluid model of a serving fleet: one step of many fleets at once."""
