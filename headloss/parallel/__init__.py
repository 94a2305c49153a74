"""Calls that many ranks make together, each with a slice of the vocabulary, tokens or segments."""
