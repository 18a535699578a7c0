"""The commands in the blocks of our documents, and what is wrong with one; nothing is carried out.

`trnpipe` and `trnjobs` are called as they are, up to the point where they would begin: unknown commands, flags and
settings, values out of bounds and files that are not there are refused by them.
"""

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import botocore.session
import pytest
from botocore import xform_name

import jobs.cli
import pipeline.cli
from tests.docs.markdown import ROOT, blocks

Words = Sequence[str]
RUNS, NEEDS_AWS = "sh", "sh aws"
OURS = ("trnpipe", "trnjobs", "make", "python", "aws")


def commands_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line and words of each of our programs in the blocks of one document."""
    for block in blocks(path):
        if block.info in (RUNS, NEEDS_AWS):
            text = re.sub(r"<<'?(\w+)'?\n.*?\n\1(\n|$)", r"\n", block.text, flags=re.DOTALL)  # here-documents
            for line in text.replace("\\\n", " ").splitlines():
                for command in re.split(r"\s(?:&&|\|\|?|;)\s", line.partition(" # ")[0].partition(" > ")[0]):
                    words = shlex.split(command, comments=True) if command.startswith(OURS) else []
                    if words:
                        yield block.line, words


def problem_of(words: Words) -> str:
    """Return what is wrong with one command; empty when nothing is."""
    match words[0]:
        case "trnpipe":
            return of_trnpipe(words[1:])
        case "trnjobs":
            return of_trnjobs(words[1:])
        case "make":
            return of_make(words[1:])
        case "aws":
            return of_aws(words[1:])
        case _:
            return "" if words[1] != "-m" or find_spec(words[2]) else f"no module {words[2]}"


def of_trnpipe(words: Words) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run_stage", "run_tool", "_launch_ranks"):
            patch.setattr(pipeline.cli, name, _begin)
        return _answer(pipeline.cli.main, words)


def of_trnjobs(words: Words) -> str:
    if words and words[0] in jobs.cli.COMMANDS:
        module = importlib.import_module(f"jobs.commands.{jobs.cli.MODULES[words[0]]}")
        with pytest.MonkeyPatch.context() as patch:
            # What `run` is given behind -- is looked at when its plan is made.
            for name in ("open_cycle", "submit_plan") if words[0] == "run" else (f"run_{words[0]}",):
                patch.setattr(module, name, _begin)
            return _answer(jobs.cli.main, words)
    return _answer(jobs.cli.main, words)


def _begin(*_: object, **__: object) -> int:
    """Stand where a command would begin."""
    return 0


def _answer(main: Callable[[Words], int], words: Words) -> str:
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(list(words))
        except SystemExit as end:  # argparse, for --help and --version
            code = int(end.code or 0)
    return told.getvalue().strip() or f"exit {code}" if code else ""


def make_targets() -> dict[str, str]:
    """Return every target of the Makefile, and its recipe."""
    text = re.sub(r"\\\n", " ", (ROOT / "Makefile").read_text(encoding="utf-8"))
    found = re.finditer(r"^(?P<name>[a-z][a-z-]*):(?!=).*\n(?P<recipe>(?:\t.*\n)*)", text, re.M)
    return {match["name"]: match["recipe"] for match in found}


def of_make(words: Words) -> str:
    """Targets and variables exist, and ARGS are settings of the command that gets them."""
    text, targets = (ROOT / "Makefile").read_text(encoding="utf-8"), make_targets()
    variables = dict(re.findall(r"^([A-Z_]+) *\?= *(.*?) *$", text, re.M))
    given = dict(word.split("=", 1) for word in words if "=" in word)
    unknown = [word for word in words if "=" not in word and word not in targets]
    unknown += [name for name in given if name not in variables]
    if unknown:
        return f"no {unknown[0]} in the Makefile"
    values = variables | given
    files = ["--config", values["CONFIG"]] if "CONFIG" in given else []
    return of_trnjobs(["config", *files, "--cycle", values["CYCLE"], *shlex.split(given.get("ARGS", ""))])


def of_aws(words: Words) -> str:
    """The service, the operation and every option are in botocore's model, or added by the AWS command line."""
    service, operation = "s3" if words[0] == "s3api" else words[0], words[1]
    if words[0] == "s3" or (service, operation) in (("logs", "tail"), ("ecr", "get-login-password")):
        return ""
    session = botocore.session.get_session()
    if service not in session.get_available_services():
        return f"no service {service} of AWS"
    model = session.get_service_model(service)
    operations = {xform_name(name, "-"): name for name in model.operation_names}
    if operation not in operations:
        return f"no operation {operation} of {service}"
    shape = model.operation_model(operations[operation]).input_shape
    known = {f"--{xform_name(name, '-')}" for name in (shape.members if shape else ())}
    known |= {"--query", "--output", "--region", "--profile", "--max-items", "--no-paginate", "--filters"}
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    return next((f"no option {option} of aws {service} {operation}" for option in options if option not in known), "")
