"""Evaluation of models: scoring, metrics, retrieval, baselines and the gate."""
