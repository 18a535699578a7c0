"""Is a command in our documents one that exists? Each program is asked in its own way; nothing is carried out.

`trnpipe` and `trnjobs` are called as they are, up to the point where they would begin: unknown commands, flags and
settings, values out of bounds and files that are not there are refused by them. A check returns what is wrong.
"""

import argparse
import contextlib
import importlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name

import jobs.cli
import pipeline.cli
from tests.docs.markdown import ROOT

Words = Sequence[str]
SHELL = frozenset({".", "cat", "docker", "echo", "git", "mkdir"})
"""Programs that are not ours, whose arguments nobody here knows."""
OF_THE_AWS_CLI = {"s3": {"cp", "ls", "rm", "sync"}, "logs": {"tail"}, "ecr": {"get-login-password"}}
"""Commands that the AWS command line adds to those of the services."""
TERRAFORM = frozenset(
    {"apply", "destroy", "fmt", "force-unlock", "import", "init", "output", "plan", "state", "test", "validate"}
)


def problem_of(words: Words) -> str:
    """What is wrong with one command; empty when nothing is. Run in a folder from which its files are found."""
    name, rest = words[0].rpartition("/")[2], list(words[1:])
    if name == "python" and rest[:1] == ["-m"]:
        return of_module(rest[1], rest[2:])
    if name in CHECKS:
        return CHECKS[name](rest)
    return "" if name in SHELL else f"{name}: a program that no test knows"


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
    """Where a command would begin."""
    return 0


def _answer(main: Callable[[Words], int], words: Words) -> str:
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(list(words))
        except SystemExit as end:  # argparse, for --help and --version
            code = int(end.code or 0)
    return told.getvalue().strip() or f"exit {code}" if code else ""


class _Parsed(Exception):
    """The arguments of a module were understood."""


def of_module(name: str, words: Words) -> str:
    """`python -m name words`: its own parser reads the words, and is stopped after that."""
    if name in ("pipeline", "jobs"):
        return CHECKS["trnpipe" if name == "pipeline" else "trnjobs"](words)
    if (spec := find_spec(name)) is None:
        return f"no module {name}"
    module = importlib.import_module(f"{name}.__main__" if spec.submodule_search_locations else name)
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *given: Any) -> None:
        parse(parser, *given)
        raise _Parsed

    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(told):
        patch.setattr(sys, "argv", [name, *words])
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        try:
            module.main()
        except _Parsed:
            return ""
        except SystemExit:
            return told.getvalue().strip()
    return f"{name} does not read its arguments"


def make_targets(makefile: Path = ROOT / "Makefile") -> dict[str, str]:
    """Every target, and its recipe."""
    text = re.sub(r"\\\n", " ", makefile.read_text(encoding="utf-8"))
    return {
        m["name"]: m["recipe"]
        for m in re.finditer(r"^(?P<name>[a-z][a-z-]*):(?!=).*\n(?P<recipe>(?:\t.*\n)*)", text, re.M)
    }


def make_variables(makefile: Path = ROOT / "Makefile") -> dict[str, str]:
    """Every variable that may be given, and its default."""
    found = re.finditer(r"^(?P<name>[A-Z_]+) *\?= *(?P<value>.*)$", makefile.read_text(encoding="utf-8"), re.M)
    return {match["name"]: match["value"].strip() for match in found}


def of_make(words: Words) -> str:
    """Targets and variables exist, files are there, and ARGS are settings of the command that gets them."""
    targets, variables = make_targets(), make_variables()
    given = dict(word.split("=", 1) for word in words if "=" in word)
    asked = [word for word in words if "=" not in word]
    if unknown := [name for name in asked if name not in targets]:
        return f"no target {unknown[0]} in the Makefile"
    if unknown := [name for name in given if name not in variables]:
        return f"no variable {unknown[0]} in the Makefile"
    values = variables | given
    if "$(FLAGS)" in "".join(targets[name] for name in asked):
        if missing := [name for name in (values["DATA"],) if name and "://" not in name and not Path(name).exists()]:
            return f"no file {missing[0]}"
        return of_trnjobs(
            ["config", "--config", values["CONFIG"], "--cycle", values["CYCLE"], *shlex.split(values["ARGS"])]
        )
    if "$(AWS_FLAGS)" in "".join(targets[name] for name in asked):
        return of_trnjobs(["config", "--cycle", values["CYCLE"], *shlex.split(values["ARGS"])])
    return ""


def terraform_variables(folder: Path = ROOT / "infra") -> set[str]:
    """Names of the root module's variables."""
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.tf"))
    return set(re.findall(r'^variable "(\w+)"', text, re.M))


def of_terraform(words: Words) -> str:
    folder = next((word.partition("=")[2] for word in words if word.startswith("-chdir=")), ".")
    asked = [word for word in words if not word.startswith("-")]
    if not (ROOT / folder).is_dir():
        return f"no folder {folder}"
    if not asked or asked[0] not in TERRAFORM:
        return f"no command {asked[:1]} of terraform"
    names = [pair.partition("=")[0] for option, pair in pairwise(words) if option == "-var"]
    return next((f"no variable {name} in infra/" for name in names if name not in terraform_variables()), "")


def of_aws(words: Words) -> str:
    """The service, the operation and every option are in botocore's model, or added by the AWS command line."""
    service, operation = words[0], words[1]
    if operation in OF_THE_AWS_CLI.get(service, ()):
        return ""
    session = botocore.session.get_session()
    if service == "s3api":
        service = "s3"
    if service not in session.get_available_services():
        return f"no service {service} of AWS"
    model = session.get_service_model(service)
    operations = {xform_name(name, "-"): name for name in model.operation_names}
    if operation not in operations:
        return f"no operation {operation} of {service}"
    shape = model.operation_model(operations[operation]).input_shape
    members = {xform_name(name, "-") for name in (shape.members if shape else ())}
    known = {
        f"--{name}"
        for name in members | {"query", "output", "region", "profile", "max-items", "no-paginate", "filters"}
    }
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    return next((f"no option {option} of aws {service} {operation}" for option in options if option not in known), "")


def of_cp(words: Words) -> str:
    """What is copied is there."""
    return next((f"no file {name}" for name in words[:-1] if not Path(name).exists()), "")


CHECKS: Mapping[str, Callable[[Words], str]] = {
    "cp": of_cp,
    "trnpipe": of_trnpipe,
    "trnjobs": of_trnjobs,
    "make": of_make,
    "terraform": of_terraform,
    "aws": of_aws,
}
