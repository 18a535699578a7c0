"""The state of a cycle in the workspace: claim, records, cost, tables and page."""
