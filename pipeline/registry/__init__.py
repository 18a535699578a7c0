"""The registry of models: the checkpoint in production, its history and lineage, and the deployed pair."""
