"""Fair-share scheduling as AWS Batch documents it: the policy, and a simulator of it."""
