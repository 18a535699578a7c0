"""Ahead-of-time compilation, which includes the trial run, graph manifests, the guard, the lint and the cache."""
