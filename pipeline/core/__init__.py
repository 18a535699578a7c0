"""Pure types and functions. Nothing here uses torch, boto3, a clock or files."""
