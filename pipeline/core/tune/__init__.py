"""What a search over settings decides from values alone."""
