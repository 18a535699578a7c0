"""The console output and the event log of a run."""
