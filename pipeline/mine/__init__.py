"""Mine hard negatives, which are unjudged products that a model or BM25 ranks high for a training query."""
