"""The relevance model, which consists of a text encoder, interactions and a relevance head."""
