"""Operator times: measured CSV files and the operator model fitted to them."""
