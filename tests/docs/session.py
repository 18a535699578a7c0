"""A terminal session: the commands of a document typed in order, in one shell, exactly as written."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.docs.markdown import ROOT
from tests.docs.shell import Command
from tests.zygote import zygote_socket

MARK = "::::: typed "
PROGRAMS = {"trnpipe": "pipeline", "trnjobs": "jobs"}
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True)
class Session:
    """What was printed after each command that was reached, and how the shell ended."""

    outputs: tuple[str, ...]
    code: int

    @property
    def last(self) -> str:
        return self.outputs[-1] if self.outputs else ""


def type_commands(commands: Sequence[Command], folder: Path, *, limit_s: float, are_forked: bool = False) -> Session:
    """Run commands in one bash in `folder`; it ends with the first that fails.

    `are_forked`: trnpipe and trnjobs are children of the zygote, which has their imports behind it, not the scripts of
    the virtual environment.
    """
    script = ["set -e", *(_functions() if are_forked else ())]
    for number, command in enumerate(commands):
        script += [f"printf '\\n{MARK}{number}\\n'", command.text]
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    ended = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", "\n".join([*script, ""])],
        cwd=folder,
        env=env | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit_s,
        check=False,
        text=True,
    )
    return Session(tuple(re.split(rf"\n{MARK}\d+\n", ended.stdout)[1:]), ended.returncode)


def _functions() -> list[str]:
    """Bash takes these before what is on the path."""
    forked = shlex.join([sys.executable, "-S", str(ROOT / "tests" / "docs" / "forked.py"), zygote_socket()])
    python = f"PYTHONPATH={shlex.quote(str(ROOT))} {forked}"
    return [f'{name}() {{ {python} {module} "$@"; }}' for name, module in PROGRAMS.items()]


def missing_lines(promised: str, output: str) -> list[str]:
    """Promised lines that do not follow each other in the output. `...` stands for anything, also for whole lines."""
    lines, place = output.splitlines(), 0
    for promise in promised.splitlines():
        if promise.strip() in ("", "..."):
            continue
        pattern = re.compile(r"\s*" + r"\s+".join(_pattern(word) for word in promise.split()) + r"\s*")
        found = next((number for number in range(place, len(lines)) if pattern.fullmatch(lines[number])), None)
        if found is None:
            return [promise]
        place = found + 1
    return []


def _pattern(word: str) -> str:
    return ".*".join(re.escape(part) for part in word.split("..."))
