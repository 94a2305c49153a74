"""Objectives bound to a packed batch: statistics that terms read, coefficients, metrics."""
