"""The entry point of a container: run and supervise one command in step with the other nodes of its job. No torch."""
