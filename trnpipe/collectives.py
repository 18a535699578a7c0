"""`import trnpipe.collectives`, then `torch.distributed.init_process_group("topo")`: see docs/parallel.md."""

from pipeline.parallel.collectives import NAME, Options

__all__ = ["NAME", "Options"]
