"""Finished entries of a compile cache against the checksums taken of them: which are damaged, and taking those away.

A compiler reads whatever lies in its cache. Nothing but these checksums tells a flipped byte from a good NEFF.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from pipeline.compile import cache_ledger, cache_remote
from pipeline.compile.cache_entry import CacheEntry, EntryName, EntryState
from pipeline.compile.cache_scan import list_entry, list_storage
from pipeline.io import atomic
from pipeline.io.errors import os_errors
from pipeline.io.storage import Storage


@dataclass(frozen=True)
class Checked:
    """`unknown`: finished entries without checksums, which prove nothing."""

    compared: int
    unknown: int
    damaged: tuple[tuple[EntryName, str], ...]

    def line(self) -> str:
        return f"checksums | {self.compared} entries compared, {len(self.damaged)} damaged | {self.unknown} without"


def check(live: Storage) -> Checked:
    """Read every byte of the finished entries that have checksums; changes nothing. Polls the storage's stop."""
    found = [(entry.name, _compare(live, entry)) for entry in _finished(live)]
    problems = [(name, problem) for name, problem in found if problem is not None]
    damaged = tuple((name, problem) for name, problem in problems if problem)
    return Checked(len(problems), len(found) - len(problems), damaged)


def mend(live: Storage) -> list[str]:
    """Take damaged entries away, so that they are compiled or pulled again; take the checksums that are missing.

    What is locked stays as it is. Returns a line for each entry that was taken away, after one with the sums.
    """
    entries, root = list(_finished(live)), live.local_path("")
    compared, recorded, lines = 0, 0, list[str]()
    with cache_ledger.cache_lock(root, live.stop) if root is not None and entries else nullcontext():
        for entry in entries:
            if entry.locks:
                continue
            etag = cache_remote.marker_etag(live, "", entry.name) if entry.is_published else ""
            problem = _compare(live, entry)
            compared += problem is not None
            if problem:
                done = _drop(live, entry, etag)
                lines.append(
                    f"{done} {entry.name.key} | {problem}" if done else f"left alone {entry.name.key} | changed"
                )
            elif problem is None and root is not None:
                cache_ledger.take(root, entry, live.stop)
                recorded += 1
    return [f"checksums | {compared} entries compared, {len(lines)} damaged | {recorded} taken anew", *lines]


def _finished(live: Storage) -> Iterator[CacheEntry]:
    for entry in list_storage(live):
        live.stop.raise_if_set("checking the compile cache")
        if entry.state is EntryState.DONE:
            yield entry


def _compare(live: Storage, entry: CacheEntry) -> str | None:
    """What is wrong with an entry, '' when nothing is, None when it has no checksums."""
    root = live.local_path("")
    if entry.is_published:
        return cache_remote.problem_of(live, "", entry.name) or ""
    if root is None or cache_ledger.read(root, entry) is None:
        return None
    return cache_ledger.problem_of(root, entry, deep=True, stop=live.stop) or ""


def _drop(live: Storage, entry: CacheEntry, etag: str) -> str:
    """Take one away; what was done, '' when it has changed since it was listed."""
    root = live.local_path("")
    if entry.is_published:
        return "withdrew damaged" if cache_remote.withdraw(live, "", entry.name, etag) else ""
    if root is None or list_entry(root, entry.name) != entry:
        return ""
    with os_errors("deleting", f"file://{root / entry.name.key}"):
        atomic.remove_tree(root / entry.name.key)
    cache_ledger.forget(root, entry.name)
    return "drop damaged"
