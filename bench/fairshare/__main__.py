"""`python -m bench.fairshare`: what a fair-share policy would have done with a workload."""

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from bench.fairshare.policy import FairSharePolicy
from bench.fairshare.report import share_reports, table_lines
from bench.fairshare.simulate import Knobs, Replay, replay
from bench.fairshare.usage import Kernel
from bench.fairshare.workload import Mix, Workload, generate
from pipeline.core.errors import EXIT_OK, ConfigError, DataError, TrnpipeError, exit_code_of

Model = TypeVar("Model", bound=BaseModel)


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0, or that of the error in pipeline/core/errors.py."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fairshare", description="Replay a workload through policies."
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(words), print)
    except TrnpipeError as error:
        print(f"bench.fairshare: {error}", file=sys.stderr)
        return exit_code_of(error)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "workload", nargs="?", type=Path, help='JSON file {"jobs": [...]}; left out: a generated mix (see --mix)'
    )
    parser.add_argument(
        "--policy",
        action="append",
        type=Path,
        default=[],
        metavar="FILE.toml",
        help="a policy; may be repeated to compare (default: equal weights)",
    )
    parser.add_argument("--mix", type=Path, metavar="FILE.toml", help="how to generate the workload")
    parser.add_argument("--num-jobs", type=int, help="jobs to generate, over --mix")
    parser.add_argument("--max-vcpus", type=int, help="vCPU of the fleet (default: that of the mix)")
    parser.add_argument("--kernel", choices=[k.value for k in Kernel], default="linear", help="how usage is forgotten")
    parser.add_argument("--backfill", action="store_true", help="what if jobs behind a blocked head could start")
    parser.add_argument("--group-scaling", action="store_true", help="what if prefix weights scale with their group")
    parser.add_argument("--starved-after-h", type=float, default=12.0, help="hours of waiting called starvation")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace, say: Callable[[str], object]) -> int:
    """Replay the workload through every policy. Raises ConfigError, DataError."""
    mix = _mix(arguments)
    if arguments.workload is not None:
        workload = _read(arguments.workload, Workload, json.loads, DataError)
    else:
        workload = generate(mix)
    policies = [_read(path, FairSharePolicy, tomllib.loads, ConfigError) for path in arguments.policy]
    knobs = Knobs(Kernel(arguments.kernel), arguments.backfill, arguments.group_scaling)
    max_vcpus = arguments.max_vcpus or mix.max_vcpus
    replays = [replay(workload, policy, max_vcpus, knobs) for policy in policies or [FairSharePolicy(name="equal")]]
    starved_after_s = arguments.starved_after_h * 3600.0
    for line in [_as_json(replays, starved_after_s)] if arguments.json else table_lines(replays, starved_after_s):
        say(line)
    return EXIT_OK


def _mix(arguments: argparse.Namespace) -> Mix:
    mix = _read(arguments.mix, Mix, tomllib.loads, ConfigError) if arguments.mix else Mix()
    given = {"num_jobs": arguments.num_jobs, "max_vcpus": arguments.max_vcpus}
    try:
        return Mix.model_validate(
            mix.model_dump() | {name: value for name, value in given.items() if value is not None}
        )
    except ValidationError as error:
        raise _refused("the command line", error, ConfigError) from error


def _read(path: Path, model: type[Model], load: Callable[[str], object], kind: type[TrnpipeError]) -> Model:
    """A file as a model. Raises `kind`."""
    try:
        return model.model_validate(load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise _refused(str(path), error, kind) from error
    except (OSError, ValueError) as error:  # both parsers raise ValueErrors
        raise kind(f"{path}: {error}", expected=f"a file that holds a {model.__name__}") from error


def _refused(where: str, error: ValidationError, kind: type[TrnpipeError]) -> TrnpipeError:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return kind(
        f"{where}: {place + ': ' if place else ''}{first['msg']}, seen {str(first['input'])[:80]!r}",
        expected="what python -m bench.fairshare --help describes",
        next_command="correct it and run again",
    )


def _as_json(replays: list[Replay], starved_after_s: float) -> str:
    return json.dumps(
        [
            {
                "policy": one.policy.model_dump(),
                "utilisation": one.utilisation,
                "span_s": one.span_s,
                "peak_vcpus": one.peak_vcpus,
                "shares": [asdict(share) for share in share_reports(one, starved_after_s)],
            }
            for one in replays
        ],
        indent=1,
    )


if __name__ == "__main__":
    sys.exit(main())
