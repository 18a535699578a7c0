"""Time and money of cycles: read from the workspace, shown as tables and as a page."""
