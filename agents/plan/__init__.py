"""Plans: which GPUs, how many, which settings, for a request log, objectives and prices."""
