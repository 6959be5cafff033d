"""NeMo Gym resources server: see README.md in this folder."""
