"""Statistics of a softmax and of a loss: laws 1 and 2, metrics, divergences."""
