"""Save, verify, find, prune and load checkpoints."""
