"""Saving, verifying, finding, retaining and loading checkpoints."""
