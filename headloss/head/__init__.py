"""The head, its adapters, and readers of heads from modules and models."""
