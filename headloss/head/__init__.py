"""The head, its adapters, and how they are read out of modules and models."""
