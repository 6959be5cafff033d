"""Sessions: live environments over a durable store of episode records."""
