"""Start, monitor and stop child processes."""
