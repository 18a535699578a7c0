"""What a container starts: one command, watched, in step with the other nodes of its job. Knows no torch."""
