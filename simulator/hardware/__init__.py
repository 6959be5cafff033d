"""Where operator times come from: measured CSV files and the operator model fitted to them."""
