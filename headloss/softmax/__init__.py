"""Sources of logits: each owns both acts on its own, partial statistics and the gradient."""
