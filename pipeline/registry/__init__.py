"""The model registry, which keeps track of the production checkpoint, its history, and the deployed pair."""
