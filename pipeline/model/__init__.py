"""The text encoders, the interactions and the relevance head."""
