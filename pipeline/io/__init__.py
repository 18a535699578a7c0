"""One storage interface for local folders and S3. No other package accesses either directly."""
