"""trnpipe: the stages that keep a text relevance model fresh (see docs/design.md)."""

__version__ = "0.1.0"
