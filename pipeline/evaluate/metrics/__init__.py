"""Metrics, computed from arrays in host memory. If a metric is undefined we report the reason, never a value of 0."""
