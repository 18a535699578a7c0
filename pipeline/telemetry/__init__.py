"""Console output and event log of a run."""
