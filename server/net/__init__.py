"""HTTP plumbing: JSON bodies, error answers, metrics, logs, limits."""
