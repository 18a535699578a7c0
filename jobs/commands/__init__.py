"""The commands of `trnjobs`."""
