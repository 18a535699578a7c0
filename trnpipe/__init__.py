"""The Python API of trnpipe.

Use it to submit cycles, access the model registry, open vectors, or call the modules of `pipeline` directly:

    import trnpipe
    cycle = trnpipe.Cycle("configs/quickstart.toml", "workspace/quickstart", "first")
    cycle.submit(); cycle.wait()
    trnpipe.open_vectors(trnpipe.Registry("workspace/quickstart").vectors_uri())

    settings = trnpipe.resolve([Path("configs/quickstart.toml")], os.environ).settings
    with trnpipe.open_context(settings, trnpipe.StopSignal()) as ctx:
        ...  # use the modules of `pipeline`

All names are imported lazily, so `import trnpipe` is fast and doesn't import torch.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

_ROOT = Path(__file__).resolve().parents[1]


def _import_own(name: str) -> None:
    """Import the package `pipeline` or `jobs`. Raises ImportError if a different module with that name was imported."""
    if name not in sys.modules:
        sys.path.insert(0, str(_ROOT))  # takes precedence over a folder with that name next to the user's script
        try:
            import_module(name)
        finally:
            sys.path.remove(str(_ROOT))
    file = getattr(sys.modules[name], "__file__", None)
    if file is None or Path(file).resolve() != _ROOT / name / "__init__.py":
        raise ImportError(
            f"{file or name} was imported as {name!r}, but trnpipe has a package with that name, so please rename it"
        )


_import_own("pipeline")
from pipeline import __version__ as __version__  # noqa: E402
from pipeline.core.optional import REQUIREMENTS, missing_package  # noqa: E402

if TYPE_CHECKING:
    from jobs.api import Cycle as Cycle
    from jobs.api import CyclePage as CyclePage
    from jobs.api import CycleResult as CycleResult
    from jobs.api import CycleStatus as CycleStatus
    from jobs.settings import CycleSettings as CycleSettings
    from pipeline.context import StageContext as StageContext
    from pipeline.context import StageResult as StageResult
    from pipeline.context import open_context as open_context
    from pipeline.core.errors import TrnpipeError as TrnpipeError
    from pipeline.core.stop import StopSignal as StopSignal
    from pipeline.embed.vectors import open_vectors as open_vectors
    from pipeline.inference.model import Model as Model
    from pipeline.inference.model import load_model as load_model
    from pipeline.parallel.checkpoint import load as load
    from pipeline.parallel.checkpoint import save as save
    from pipeline.parallel.config import Plan as Plan
    from pipeline.parallel.lightning import Environment as Environment
    from pipeline.parallel.lightning import Strategy as Strategy
    from pipeline.parallel.mesh import init as init
    from pipeline.parallel.mesh import layout as layout
    from pipeline.parallel.parallelize import delayed_init as delayed_init
    from pipeline.parallel.parallelize import transform as transform
    from pipeline.parallel.tensors import clip_grad_norm as clip_grad_norm
    from pipeline.registry.model import Registry as Registry
    from pipeline.settings import Settings as Settings
    from pipeline.settings import resolve as resolve

_NAMES = {
    "jobs.api": ("Cycle", "CyclePage", "CycleResult", "CycleStatus"),
    "jobs.settings": ("CycleSettings",),
    "pipeline.context": ("StageContext", "StageResult", "open_context"),
    "pipeline.core.errors": ("TrnpipeError",),
    "pipeline.core.stop": ("StopSignal",),
    "pipeline.embed.vectors": ("open_vectors",),
    "pipeline.inference.model": ("Model", "load_model"),
    "pipeline.parallel.checkpoint": ("load", "save"),
    "pipeline.parallel.config": ("Plan",),
    "pipeline.parallel.lightning": ("Environment", "Strategy"),
    "pipeline.parallel.mesh": ("init", "layout"),
    "pipeline.parallel.parallelize": ("delayed_init", "transform"),
    "pipeline.parallel.tensors": ("clip_grad_norm",),
    "pipeline.registry.model": ("Registry",),
    "pipeline.settings": ("Settings", "resolve"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'trnpipe' has no attribute {name!r}")
    try:
        _import_own(_HOME[name].partition(".")[0])
        module = import_module(_HOME[name])
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in REQUIREMENTS:
            raise
        raise missing_package(package, f"trnpipe.{name}", error) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
