"""How a model is spread over devices: one file a strategy."""
