"""trnpipe: stages that regularly retrain a text relevance model (see docs/design.md)."""

__version__ = "0.1.0"
