"""Exact search in a catalogue by vectors and by words, used by evaluation, mining and inference."""
