"""Inputs of a call, packed on construction: batch, segments, totals and reductions."""
