"""Ranks: launching them, agreeing between them."""
