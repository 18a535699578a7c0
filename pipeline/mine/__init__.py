"""Hard negatives: what a model, or BM25, takes for relevant to a training query and nobody has judged."""
