"""trnjobs: plan and run a cycle as jobs."""
