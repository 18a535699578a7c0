"""trnjobs: planning and running the cycle as jobs."""
