"""What `trnjobs` can be asked."""
