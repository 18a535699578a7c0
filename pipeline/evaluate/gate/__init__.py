"""Whether a candidate may replace the model in production."""
