"""Batches as a user makes them, and packed: segments, totals, reductions, support."""
