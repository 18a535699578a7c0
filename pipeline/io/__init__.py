"""The only seam to storage: local folders and S3 behind one interface."""
