"""Episode engine: batch first, with scalar and vector faces."""
