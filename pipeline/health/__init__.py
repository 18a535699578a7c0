"""Is this machine fit for work: checks that find a sick one in a minute and name it."""
