"""The stages of trnpipe, which regularly retrain a search relevance model (see docs/design.md)."""

__version__ = "0.1.0"
