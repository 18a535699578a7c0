"""Run an outside program within limits: what it said, how it ended, and no process of it left.

A sick device makes its tools hang, print half an answer or flood; none of that may hang or crash the check.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from pydantic import Field

from pipeline.core.stop import StopSignal
from pipeline.proc.tree import MARK_VARIABLE, ProcessTree

# Not on PATH under every container entry point.
TOOL_FOLDERS = ("/opt/aws/neuron/bin", "/opt/amazon/efa/bin")
OUTPUT_LIMIT_BYTES = 8 * 2**20
_SEEN_LENGTH = 300


@dataclass(frozen=True)
class ToolRun:
    """How a program ended.

    exit_code: None where it did not end by itself. timed_out: the time limit ended it. failure: why it could not be
    started or was ended by us; empty where it ended by itself or had said enough. num_left: processes of it that
    SIGKILL did not end, as one stuck in a driver.
    """

    command: tuple[str, ...]
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    missing: bool = False
    timed_out: bool = False
    failure: str = ""
    num_left: int = 0
    seconds: float = 0.0

    @property
    def output(self) -> str:
        return f"{self.stdout}\n{self.stderr}"

    def told(self) -> str:
        """One line: how it ended and its last words."""
        how = self.failure or ("ended when asked" if self.exit_code is None else f"exit code {self.exit_code}")
        words = last_line(self.stderr) or last_line(self.stdout)
        stuck = f"; {self.num_left} of its processes cannot be killed" if self.num_left else ""
        name = Path(self.command[0]).name
        if self.missing:
            return f"{name} {how}"
        return f"{name}: {how}{stuck}" + (f": {words}" if words else ", no output")


def run_tool(
    command: Sequence[str],
    *,
    timeout_s: float,
    stop: StopSignal,
    env: Mapping[str, str] | None = None,
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    enough: Callable[[str], bool] | None = None,
) -> ToolRun:
    """Run `command` to its end or a limit. Raises Preempted on the stop signal, and nothing for what a tool does.

    Args:
        env: its environment; None is ours.
        output_limit_bytes: of standard output and error each; more ends it, and is cut off.
        enough: given the standard output so far, says that the program may be ended (for one that runs for ever).
    """
    environment = dict(os.environ if env is None else env)
    folders = os.pathsep.join((environment.get("PATH", os.defpath), *TOOL_FOLDERS))
    found = shutil.which(command[0], path=folders)
    if found is None:
        return ToolRun(tuple(command), missing=True, failure="is not installed")
    started = time.monotonic()
    try:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            watched = _Watched(Path(folder), timeout_s, output_limit_bytes, enough)
            return watched.run((found, *command[1:]), environment, stop)
    except OSError as error:  # not a program for this machine, no memory for a process, no space for its output
        why = f"could not be run: {error.strerror or error}"
        return ToolRun(tuple(command), failure=why, seconds=time.monotonic() - started)


@dataclass(frozen=True)
class _Watched:
    folder: Path
    timeout_s: float
    limit_bytes: int
    enough: Callable[[str], bool] | None

    def run(self, command: tuple[str, ...], env: Mapping[str, str], stop: StopSignal) -> ToolRun:
        started = time.monotonic()
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            # Two files: warnings in the middle of a JSON answer would spoil it.
            process = subprocess.Popen(  # noqa: S603 - a list, no shell
                command,
                cwd=self.folder,
                env={**env, MARK_VARIABLE: mark},
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        tree = ProcessTree(process, mark)
        try:
            failure, timed_out = self._watch(tree, started + self.timeout_s, stop, Path(command[0]).name)
            code = tree.poll()
        finally:
            tree.end(0.0)
        if not failure and self._flooded():
            failure = self._flood()
        return ToolRun(
            command,
            exit_code=code,
            stdout=self._read("stdout"),
            stderr=self._read("stderr"),
            timed_out=timed_out,
            failure=failure,
            num_left=len(tree.members()) if timed_out else 0,
            seconds=time.monotonic() - started,
        )

    def _watch(self, tree: ProcessTree, until: float, stop: StopSignal, name: str) -> tuple[str, bool]:
        size, pause_s = 0, 0.01
        while tree.poll() is None:
            stop.raise_if_set(f"running {name}")
            if self._flooded():
                return self._flood(), False
            if self.enough and (now := self._size("stdout")) != size:
                size = now
                if self.enough(self._read("stdout")):
                    return "", False
            if time.monotonic() >= until:
                return f"did not end within {self.timeout_s:g} s", True
            stop.wait(pause_s)
            pause_s = min(0.1, 1.5 * pause_s)
        return "", False

    def _flooded(self) -> bool:
        return max(self._size("stdout"), self._size("stderr")) > self.limit_bytes

    def _flood(self) -> str:
        return f"wrote more than {self.limit_bytes} bytes"

    def _size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def _read(self, name: str) -> str:
        with (self.folder / name).open("rb") as file:
            return file.read(self.limit_bytes).decode(errors="replace")


Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number that a tool counts: more is none, and breaks arithmetic."""


def last_line(text: str) -> str:
    """The last line with words, printable and cut to a length that fits a message."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    line = next((line for line in lines if line), "")
    return "".join(char if char.isprintable() else " " for char in line).strip()[:_SEEN_LENGTH]


def json_in(text: str) -> object:
    """The JSON value a tool printed, maybe after lines of other text; None where there is none or it is cut off."""
    # Only at the start of a line: an inner object of one that is cut off must not pass for the whole.
    for start in _JSON_START.finditer(text):
        try:
            return json.JSONDecoder().raw_decode(text, start.start())[0]
        except (ValueError, RecursionError):
            continue
    return None


_JSON_START = re.compile(r"^[\[{]", re.MULTILINE)
