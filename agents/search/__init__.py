"""Search for policies and task constants: solver, calibration, ablation."""
