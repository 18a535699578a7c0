"""Exact search in a catalogue by vectors or with BM25, used by evaluation, mining and inference."""
