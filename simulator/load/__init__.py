"""Offered load: sources of requests, and the statistics that the dynamics need in advance."""
