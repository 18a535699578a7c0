"""The text encoder, the interactions, the heads and the losses."""
