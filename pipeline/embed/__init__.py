"""Embed texts with the encoder of a checkpoint."""
