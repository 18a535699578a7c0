"""Scoring, metrics, retrieval, baselines, the gate."""
