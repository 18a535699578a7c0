"""Which commands of our documents a test types, and which no test does. Every one must be in one list."""

import fnmatch

QUICK = (
    ". .venv/bin/activate",
    "mkdir -p build*",
    "cat *",
    "trnpipe --help",
    "trnpipe config *",
    "trnpipe prepare --config build/own.toml * --cycle 2026-*",
    "trnpipe prepare --workspace build/example/workspace *",
    "trnpipe prepare --config configs/small.toml --workspace workspace/esci --cycle ranking *",
    "trnpipe doctor --config build/own.toml *",
    "trnpipe doctor --config configs/small.toml",
    "trnpipe cache status --config configs/small.toml *",
    "trnjobs plan --config configs/quickstart.toml*",
    "trnjobs plan --target local *",
    "python -m bench.fairshare *",
    "make bootstrap",
)
"""Seconds each: typed in every run of the tests, in the order of their document."""

LONG = (
    "make cycle*",
    "make train*",
    "trnjobs cost *",
    "trnjobs run *",
    "trnpipe registry show *",
    "trnpipe doctor * --hlo",
    "trnpipe prepare --config build/own.toml * --cycle us-only *",  # the ranking's prepare has a filter too
    "trnpipe prepare --config configs/small.toml --workspace workspace/esci --cycle first *",  # as that, without one
    "trnpipe prepare --config configs/quickstart.toml --workspace workspace/search *",
    "python -m tests.fault.kill_marathon *",
)
"""Minutes, or about what those have left: typed by `make test-thorough`, with the quick ones in between."""

NOT_TYPED = {
    "make test": "it is what runs this test",
    "git clone https://github.com/amazon-science/esci-data.git": "a gigabyte from the internet; the test puts a small "
    "dataset of the same layout there",
}
"""Why no test types it."""


def lists_of(line: str) -> list[str]:
    """Names of the lists that a command is in, by its first line."""
    lists = {"QUICK": QUICK, "LONG": LONG, "NOT_TYPED": tuple(NOT_TYPED)}
    return [name for name, patterns in lists.items() if any(matches(line, pattern) for pattern in patterns)]


def matches(line: str, pattern: str) -> bool:
    """A pattern of the lists against a command without its comment."""
    command = line.split("  #")[0].rstrip()
    return fnmatch.fnmatchcase(command, pattern) or fnmatch.fnmatchcase(command + " ", pattern)
