"""What to run: jobs and their dependencies, retry rules and cost. Pure: no AWS, no clock, no files."""
