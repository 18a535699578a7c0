"""Input tables to fixed-shape token shards, and from there to batches."""
