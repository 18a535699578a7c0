"""Which living compilers may be at work on one cache: several jobs of one machine have a cache each."""

from collections.abc import Mapping
from pathlib import Path

import psutil

from pipeline.compile.cache_host import CompilerProcess, live_compilers

DEFAULT_ROOT = "/var/tmp/neuron-compile-cache"  # noqa: S108 - Neuron's own default (SDK 2.29, persistent cache)


def compilers_of(root: str) -> list[CompilerProcess]:
    """Compilers of this host but those whose environment, which they have from who started them, names another cache.

    One whose environment cannot be read may be at work on any.
    """
    return [compiler for compiler in live_compilers() if _may_use(compiler.pid, root)]


def named_cache(env: Mapping[str, str]) -> str:
    """The cache a compiler with this environment works on: --cache_dir in its flags goes before the variable."""
    folders = [word.partition("=")[2] for word in env.get("NEURON_CC_FLAGS", "").split() if "--cache_dir=" in word]
    return folders[-1] if folders else env.get("NEURON_COMPILE_CACHE_URL", DEFAULT_ROOT)


def _may_use(pid: int, root: str) -> bool:
    try:
        env = psutil.Process(pid).environ()
    except psutil.NoSuchProcess:
        return False
    except (OSError, psutil.Error):  # another user's
        return True
    return _canonical(named_cache(env)) == _canonical(root)


def _canonical(root: str) -> str:
    path = root.removeprefix("file://")
    return path.rstrip("/") if "://" in path else str(Path(path).expanduser().resolve())
