"""Import and export models: Hugging Face and sentence-transformers folders, plain weights, TorchScript programs."""
