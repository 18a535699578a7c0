"""A study of how a step scales over 1 to 128 nodes and which plan suits which model; modelled, nothing measured."""
