"""What is measured of a softmax, and what of a loss: laws 1 and 2, metrics, divergences."""
