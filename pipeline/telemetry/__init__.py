"""What a person or a machine sees of a run: console lines, events, logs."""
