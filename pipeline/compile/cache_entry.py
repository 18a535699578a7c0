"""One entry of a compile cache: its name, its files, and the state they tell. Pure.

Layout, local and on S3: `neuronxcc-<version>+<build>/MODULE_<graph hash>+<flags hash>/<files>`. Sources: AWS Neuron SDK
2.29, neuron-caching.rst; the table of states is that of optimum-neuron's cache clean-up.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from pipeline.core.manifest import MANIFEST_NAME

NEURON_COMPILER = "neuronxcc"
HLO_NAMES = ("model.hlo_module.pb", "model.hlo.pb")  # the second up to about SDK 2.17
NEFF_NAME = "model.neff"
DONE_NAME = "model.done"  # an empty marker, written last
LOG_NAME = "model.log"  # the compiler's error text
FLAGS_NAME = "compile_flags.json"  # from about SDK 2.20 on
LOCK_SUFFIX = ".lock"

_VERSION = re.compile(r"(?P<compiler>[A-Za-z][A-Za-z0-9_]*)-(?P<version>[0-9][^+/]*)(?:\+(?P<build>[^/]+))?")
# The graph hash is a decimal integer (training) or 20 hex digits (torch_neuronx.trace).
_MODULE = re.compile(r"MODULE_(?P<graph>[0-9A-Za-z_]+)\+(?P<flags>[0-9a-f]{8})")
_PUBLISHED_FILE = re.compile(r"[0-9a-f]{32}/.+")


class EntryState(StrEnum):
    """What a compile cache says of one graph."""

    DONE = "done"
    FAILED = "failed"  # "poisoned": the failure is reused for ever
    LOCKED = "locked"  # compiling now, or a lock that a dead compiler left
    COLLECTED = "collected"  # traced, never compiled
    INCOMPLETE = "incomplete"  # what a killed writer left


@dataclass(frozen=True, order=True)
class EntryName:
    """The two folders of an entry, and the parts of their names."""

    version_dir: str
    module_dir: str
    compiler: str
    version: str
    build: str
    graph: str
    flags: str

    @property
    def key(self) -> str:
        """`<version folder>/<module folder>`: its place below the root."""
        return f"{self.version_dir}/{self.module_dir}"

    def is_of(self, compiler_versions: Collection[str]) -> bool:
        """True when one of them names its compiler: `neuronxcc-2.24.8799.0+6f62ff7c`, or the version alone."""
        return not {self.version_dir, self.version, f"{self.version}+{self.build}"}.isdisjoint(compiler_versions)


def is_version_dir(text: str) -> bool:
    return _VERSION.fullmatch(text) is not None


def parse_entry(key: str) -> EntryName | None:
    """The entry at `<version folder>/<module folder>`; None for anything else."""
    version_dir, _, module_dir = key.partition("/")
    version, module = _VERSION.fullmatch(version_dir), _MODULE.fullmatch(module_dir)
    if version is None or module is None:
        return None
    return EntryName(
        version_dir=version_dir,
        module_dir=module_dir,
        compiler=version["compiler"],
        version=version["version"],
        build=version["build"] or "",
        graph=module["graph"],
        flags=module["flags"],
    )


def is_lock(file_name: str) -> bool:
    return file_name.endswith(LOCK_SUFFIX)


def entry_state(file_names: Collection[str], *, compiler: str = NEURON_COMPILER) -> EntryState:
    """The state told by the names of an entry's files.

    Only neuronx-cc leaves a NEFF; for another compiler the marker and the graph are the whole result. A finished
    result counts even beside a lock, which then only waits to be removed.
    """
    names = frozenset(file_names)
    has_graph = not names.isdisjoint(HLO_NAMES)
    has_result = NEFF_NAME in names if compiler == NEURON_COMPILER else has_graph
    if DONE_NAME in names and has_result:
        return EntryState.DONE
    if any(is_lock(name) for name in names):
        return EntryState.LOCKED
    if LOG_NAME in names and DONE_NAME not in names:
        return EntryState.FAILED
    if has_graph and NEFF_NAME not in names and DONE_NAME not in names:
        return EntryState.COLLECTED
    return EntryState.INCOMPLETE


@dataclass(frozen=True)
class CacheFile:
    """One file of an entry. `modified_s`: seconds since the epoch, None where the storage does not tell."""

    name: str
    size_bytes: int
    modified_s: float | None = None


@dataclass(frozen=True)
class CacheEntry:
    """An entry as it was found."""

    name: EntryName
    files: tuple[CacheFile, ...]

    @property
    def is_published(self) -> bool:
        """True for the layout of `cache_remote`: files in a folder of their own under a marker with checksums."""
        return any(file.name == MANIFEST_NAME or _PUBLISHED_FILE.fullmatch(file.name) for file in self.files)

    @property
    def state(self) -> EntryState:
        if self.is_published:
            return EntryState.DONE if self.sizes.get(MANIFEST_NAME) else EntryState.INCOMPLETE
        return entry_state(self.sizes, compiler=self.name.compiler)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by file name."""
        return {file.name: file.size_bytes for file in self.files}

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def modified_s(self) -> float | None:
        """When its newest file changed."""
        return max((file.modified_s for file in self.files if file.modified_s is not None), default=None)

    @property
    def locks(self) -> tuple[CacheFile, ...]:
        return tuple(file for file in self.files if is_lock(file.name))

    def without_locks(self) -> "CacheEntry":
        return CacheEntry(self.name, tuple(file for file in self.files if not is_lock(file.name)))

    def age_s(self, now_s: float) -> float | None:
        """Since the last change."""
        return None if self.modified_s is None else now_s - self.modified_s

    def is_lock_older(self, now_s: float, than_s: float) -> bool:
        """True when it has locks and all of them are older; never where ages are unknown."""
        ages = [None if lock.modified_s is None else now_s - lock.modified_s for lock in self.locks]
        return bool(ages) and all(age is not None and age > than_s for age in ages)
