"""A log read while it grows: how far the compile is, and whether it waits for a lock that nobody holds.

A compiler that is killed leaves its lock, and who comes next waits for it without end; hours have been lost to that.
"""

from pathlib import Path

from pipeline.compile.cache_host import Compilers, live_compilers
from pipeline.compile.neuron_log import CacheCounts, parse_counts, parse_waiting

SIGHTINGS = 2  # messages of waiting, one a minute, that came while no compiler ran; one may be bad luck


class LogWatch:
    """Follows the log of one run. With a cache that other machines share, a lock may well be held elsewhere."""

    def __init__(self, path: Path, *, is_local: bool, compilers: Compilers = live_compilers) -> None:
        self.path = path
        self.last_news = ""
        self._is_local = is_local
        self._compilers = compilers
        self._position = 0
        self._rest = b""
        self.counts: CacheCounts | None = None
        self._sightings = 0

    def news(self) -> list[str]:
        """One line when the counts have changed since the last call; [] otherwise. Reads what is new in the log."""
        text = self._read()
        waiting = parse_waiting(text)
        if waiting and self._is_local:
            self._sightings = 0 if self._compilers() else self._sightings + 1
        lines = [f"a compile waits for the lock of {wait.what or 'a graph'}" for wait in waiting]
        counts = parse_counts(text)
        if counts is not None and counts != self.counts:
            self.counts = counts
            lines.append(
                f"graphs in the cache: {counts.done} done, {counts.remaining} to do, {counts.locked} locked, "
                f"{counts.failed} failed"
            )
        self.last_news = lines[-1] if lines else self.last_news
        return lines

    def is_stuck(self) -> bool:
        """True when it keeps waiting for a lock while no compiler runs on this host."""
        return self._sightings >= SIGHTINGS

    def _read(self) -> str:
        """Whole lines written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        return (whole + newline).decode(errors="replace")
