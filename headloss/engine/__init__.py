"""Run a call of `head_loss`: check and pack the inputs, plan, and loop over chunks of tokens."""
