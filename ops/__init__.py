"""Tools for operators to use on their own logs: read, plan, compare, report."""
