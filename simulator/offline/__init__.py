"""Offline tools: discrete-event reference engine, table builder, importers of request logs and benchmark files."""
