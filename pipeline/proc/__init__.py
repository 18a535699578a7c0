"""Start, mark, monitor and stop child processes."""
