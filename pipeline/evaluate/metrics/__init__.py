"""Metrics over host arrays. A metric that cannot be computed is reported with the reason, never as 0."""
