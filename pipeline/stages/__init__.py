"""One file per stage: validate, do, commit a result."""
