"""Training jobs of Amazon SageMaker as a target. Only `client` and `limits` know botocore."""
