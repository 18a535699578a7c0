"""Texts to vectors, with the encoder of a checkpoint."""
