"""The page of a cycle, its data as JSON, and the index of all cycles: `reports/`."""
