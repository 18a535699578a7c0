"""Model evaluation: scoring, metrics, retrieval, baselines, and the gate that decides about promotion."""
