"""Convert input tables to fixed-shape token shards, and read batches from them."""
