"""A common storage interface for local folders and S3. No other package should access either of them directly."""
