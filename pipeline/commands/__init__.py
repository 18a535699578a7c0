"""Commands beside the stages, `run(settings, stop, say, *words)` each, imported by the command line when they run."""
