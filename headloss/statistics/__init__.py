"""Softmax statistics of the logits, metrics of a loss, and divergences between two
distributions."""
