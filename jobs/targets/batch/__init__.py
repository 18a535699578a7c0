"""AWS Batch as a target, the only package of jobs/ that imports boto3."""
