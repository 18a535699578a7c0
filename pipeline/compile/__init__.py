"""Compiled graphs: the cache they lie in, and what keeps it whole."""
