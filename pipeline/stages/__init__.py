"""The stages of a cycle, each of which validates its inputs, does the work, and commits a result."""
