"""Ranks, process groups, and models sharded over them."""
