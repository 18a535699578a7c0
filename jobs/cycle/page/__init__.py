"""The report page of a cycle, with its charts and data."""
