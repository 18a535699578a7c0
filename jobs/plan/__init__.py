"""Plans: jobs and their dependencies, retry rules and prices. Pure: no AWS, no clock, no files."""
