"""`trnpipe tune`: a search over training settings with Optuna, by real training runs on the prepared data."""
