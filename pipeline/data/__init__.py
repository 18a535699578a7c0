"""Convert input tables to token shards of fixed shapes, and load batches from them."""
