"""Sources of logits: each makes the statistics of its logits and their gradient."""
