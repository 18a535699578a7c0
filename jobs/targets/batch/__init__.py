"""AWS Batch as a target: the only place in jobs/ that knows boto3."""
