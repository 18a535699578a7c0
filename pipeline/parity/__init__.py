"""The same checkpoint and the same training on two backends or precisions, recorded and compared."""
