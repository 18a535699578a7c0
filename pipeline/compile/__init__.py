"""Ahead-of-time compilation: trial run, graph manifest, guard, lint, cache."""
