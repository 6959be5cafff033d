"""Search: solver of a task, calibration of its constants, ablation of its knobs, tasks from request logs."""
