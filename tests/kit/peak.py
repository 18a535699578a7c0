"""The most memory that a command of ours has had, as its own process says when it ends."""

from collections.abc import Sequence

# VmHWM and not ru_maxrss, which a child takes over from the process that started it.
_PEAK = "; print('PEAK', open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]); raise SystemExit(code)"


def measured(words: Sequence[str]) -> str:
    """Python's text (`python -c`) of `trnpipe` with these words, which says its peak at last."""
    return f"from pipeline import cli; code = cli.main({list(words)!r}){_PEAK}"


def peak_mib(said: str) -> int:
    """MiB, of what such a process wrote."""
    return int(said.rpartition("PEAK ")[2]) // 1024
