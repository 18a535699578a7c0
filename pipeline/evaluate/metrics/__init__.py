"""Metrics over host arrays. What cannot be computed never becomes a 0: it is an error, or is named with its reason."""
