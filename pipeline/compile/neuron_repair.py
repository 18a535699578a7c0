"""The repair of a cache between two runs of neuron_parallel_compile, as `compile_graphs` wants it."""

from pathlib import Path

from pipeline.compile.cache_host import Compilers
from pipeline.compile.cache_repair import repair_local, repair_storage
from pipeline.compile.neuron_compilers import compilers_of
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage


def repair_after_run(root: str, *, compilers: Compilers | None = None) -> list[str]:
    """Put the cache in `root` in order when no compiler of ours runs any more; [] when there was nothing to do.

    A lock of any age counts as stale then, unless another compiler of this cache lives on this host. On S3 locks stay:
    they may be another machine's. Does not heed a stop signal, so that a stopped run leaves no lock.
    """
    if root.startswith("s3://"):
        report = repair_storage(open_storage(root, stop=StopSignal()))
    else:
        alive = compilers or (lambda: compilers_of(root))
        report = repair_local(Path(root.removeprefix("file://")), stale_lock_s=0.0, compilers=alive)
    return report.lines() if report.actions else []
