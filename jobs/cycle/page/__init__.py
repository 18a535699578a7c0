"""The page of a cycle, its charts and its data."""
