"""A policy on a real serving engine: its traffic, its metrics, its knobs, and the serving environment over them."""
