"""Pure types and functions that do not depend on torch, boto3, the clock or the file system."""
