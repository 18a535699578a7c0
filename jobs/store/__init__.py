"""What a cycle of jobs keeps in the workspace."""
