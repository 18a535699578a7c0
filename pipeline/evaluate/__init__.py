"""Scoring a model on a holdout."""
