"""Pure decisions: no torch, no boto3, no clock, no files."""
