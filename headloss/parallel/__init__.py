"""Calls that many ranks make together: slices of the vocabulary, tokens, segments."""
