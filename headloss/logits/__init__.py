"""Sources of logits: each source computes the statistics of its logits and the logits' gradient."""
