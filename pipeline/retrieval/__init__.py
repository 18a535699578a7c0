"""Exact search in a catalogue by vectors or with BM25, which is used by evaluation, mining and inference."""
