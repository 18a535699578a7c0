"""Training jobs of Amazon SageMaker as a target. Only `requests` knows botocore."""
