"""Statistics, an objective bound to a packed batch, its coefficients, its metrics."""
