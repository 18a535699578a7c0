"""Pure decisions about jobs: no AWS, no clock, no files."""
