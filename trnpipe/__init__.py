"""trnpipe from a script or a notebook: cycles, the registry, vectors, settings, and what a stage is given to work with.

    import trnpipe
    cycle = trnpipe.Cycle("configs/quickstart.toml", "workspace/quickstart", "first")
    cycle.submit(); cycle.wait()
    trnpipe.open_vectors(trnpipe.Registry("workspace/quickstart").vectors_uri())

    settings = trnpipe.resolve([Path("configs/quickstart.toml")], os.environ).settings
    with trnpipe.open_context(settings, trnpipe.StopSignal()) as ctx:
        ...  # what the modules of `pipeline` offer

Names are imported when they are first asked for: `import trnpipe` alone imports neither torch nor the settings.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from pipeline import __version__

if TYPE_CHECKING:
    from jobs.api import Cycle, CyclePage, CycleResult, CycleStatus
    from jobs.settings import CycleSettings
    from pipeline.context import StageContext, StageResult, open_context
    from pipeline.core.errors import TrnpipeError
    from pipeline.core.stop import StopSignal
    from pipeline.embed.handover import open_vectors
    from pipeline.parallel.adopt import init, layout, transform
    from pipeline.parallel.config import Plan
    from pipeline.parallel.delayed_init import delayed_init
    from pipeline.parallel.files import load, save
    from pipeline.parallel.lightning import Environment, Strategy
    from pipeline.parallel.tensors import clip_grad_norm
    from pipeline.registry.model import Registry
    from pipeline.settings import Settings, resolve

__all__ = [
    "Cycle",
    "CyclePage",
    "CycleResult",
    "CycleSettings",
    "CycleStatus",
    "Environment",
    "Plan",
    "Registry",
    "Settings",
    "StageContext",
    "StageResult",
    "StopSignal",
    "Strategy",
    "TrnpipeError",
    "__version__",
    "clip_grad_norm",
    "delayed_init",
    "init",
    "layout",
    "load",
    "open_context",
    "open_vectors",
    "resolve",
    "save",
    "transform",
]
_HOME = {
    "Cycle": "jobs.api",
    "CyclePage": "jobs.api",
    "CycleResult": "jobs.api",
    "CycleSettings": "jobs.settings",
    "CycleStatus": "jobs.api",
    "Environment": "pipeline.parallel.lightning",
    "Plan": "pipeline.parallel.config",
    "Registry": "pipeline.registry.model",
    "Settings": "pipeline.settings",
    "StageContext": "pipeline.context",
    "StageResult": "pipeline.context",
    "StopSignal": "pipeline.core.stop",
    "Strategy": "pipeline.parallel.lightning",
    "TrnpipeError": "pipeline.core.errors",
    "clip_grad_norm": "pipeline.parallel.tensors",
    "delayed_init": "pipeline.parallel.delayed_init",
    "init": "pipeline.parallel.adopt",
    "layout": "pipeline.parallel.adopt",
    "load": "pipeline.parallel.files",
    "open_context": "pipeline.context",
    "open_vectors": "pipeline.embed.handover",
    "resolve": "pipeline.settings",
    "save": "pipeline.parallel.files",
    "transform": "pipeline.parallel.adopt",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'trnpipe' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
