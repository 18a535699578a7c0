"""Exact search in a catalogue, with vectors and with words: what evaluation and mining are built on."""
