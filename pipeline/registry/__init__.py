"""Which checkpoint is in production, how it came there, and what it descends from."""
