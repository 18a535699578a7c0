"""What the cache doctor must know of this host: compilers at work, and the file system a folder lies on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import psutil

from pipeline.core.errors import ConfigError

COMPILER_NAMES = ("neuronx-cc", "walrus_driver")  # the driver and its longest running child
# Neuron's locking over these is documented as unreliable: missing files, corruption, KeyError.
NETWORK_TYPES = frozenset({"nfs", "nfs4", "lustre", "efs", "cifs", "smb3"})
NETWORK_TYPE_PREFIX = "fuse."
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs"})  # the root of a container without privileges: a local disk below


@dataclass(frozen=True)
class CompilerProcess:
    """A running compiler."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    folder: str
    file_system: str


Compilers = Callable[[], Sequence[CompilerProcess]]
Mounts = Callable[[], Sequence[Mount]]


def live_compilers() -> list[CompilerProcess]:
    """Compiler processes of this host, or of this container: those of another one on the same disk are not seen."""
    found = []
    for process in psutil.process_iter(["pid", "name", "cmdline", "status"]):
        info = process.info
        if info["status"] == psutil.STATUS_ZOMBIE:
            continue
        # A console script may run as `python -u /opt/.../neuronx-cc compile`.
        names = [info["name"] or "", *(PurePath(word).name for word in (info["cmdline"] or [])[:3])]
        name = next((name for name in names if name.startswith(COMPILER_NAMES)), None)
        if name is not None:
            found.append(CompilerProcess(int(info["pid"]), name))
    return found


def mounted() -> list[Mount]:
    """All mounts of this host, in the order they were made."""
    return [Mount(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]


def mount_of(folder: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount a folder lies (or would lie) on: the deepest, and of two at one place the later."""
    real = folder.resolve()
    above = [mount for mount in mounts if real.is_relative_to(mount.folder)]
    return max(reversed(above), key=lambda mount: len(PurePath(mount.folder).parts), default=None)


def is_network(file_system: str) -> bool:
    kind = file_system.lower()
    return kind in NETWORK_TYPES or (kind.startswith(NETWORK_TYPE_PREFIX) and kind not in LOCAL_FUSE)


def refuse_network_root(root: Path, *, mounts: Mounts = mounted) -> None:
    """ConfigError when compilers would share `root` over a network file system."""
    mount = mount_of(root, mounts())
    if mount is not None and is_network(mount.file_system):
        raise ConfigError(
            f"compile cache {root} lies on {mount.file_system} (mounted at {mount.folder})",
            expected="a local disk: the compiler's locks are not reliable on a network file system",
            next_command="set the cache to a local folder and share it with `trnpipe cache sync` through S3",
        )


# Which living compilers may be at work on one cache: several jobs of one machine have a cache each.

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
