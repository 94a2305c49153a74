"""Statistics of a softmax and of a loss, metrics, and divergences (laws 1 and 2 of DESIGN.md)."""
