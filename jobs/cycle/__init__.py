"""What became of a cycle: its claim, records, time and money in the workspace, tables and page."""
