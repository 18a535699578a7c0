"""Models from and for other people's tools: Hugging Face and sentence-transformers folders, plain weights, programs."""
