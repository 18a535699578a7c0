"""The stages, one file each: validate the inputs, do the work, commit a result."""
