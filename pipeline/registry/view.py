"""The registry of one model from Python: `trnpipe.Registry`."""
