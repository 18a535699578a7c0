"""Ranks, and how a model is spread over them."""
