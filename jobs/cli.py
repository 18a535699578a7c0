"""The command-line interface `trnjobs`, with its commands and their flags."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from pipeline.command_line import COMPLETION, CommandParser, Usage, completion, run_program, show
from pipeline.core.errors import EXIT_OK

# Each command is a function `run_<name>(arguments, say) -> exit code` in the module of jobs/commands that MODULES lists
# for it. The function reads the settings of the cycle from `arguments.settings`.
COMMANDS: dict[str, str] = {
    "submit": "run a cycle here, on AWS Batch or on SageMaker; safe to repeat, because no job is started twice",
    "status": "show the jobs of a cycle",
    "logs": "show the log of an attempt of a job; for any of its nodes",
    "history": "list the cycles of a workspace",
    "diff": "compare two cycles: settings, data, metrics; by default, the two newest",
    "report": "write the page of a cycle, reports/<cycle>.html; this also happens whenever a cycle ends",
    "retry": "continue a failed or interrupted cycle; reruns failed jobs and their dependents with the stored settings",
    "cancel": "cancel the unfinished jobs of a cycle; starting with the last job",
    "run": "run your own script as a job, such as -- python train.py; with ranks and retries like a stage",
    "plan": "show the jobs of a cycle: sizes, limits, time and cost; with --json, the exact requests",
    "cost": "show time and cost of a cycle by stage; with --last N, of several cycles, and their success rate",
    "fit": "check that a cycle fits what Terraform will create; this covers schedule, limits and capacity",
    "driver": "start the cycle that is due, once; this is the entry point for the scheduler",
    "reconcile": "record job states and close cycles that have ended; for --cycle, or for all open cycles",
    "notify": "send pending notifications; with --test, send a test message to every address first",
    "config": "print every setting with its value and source; including [jobs]",
    "completion": COMPLETION.replace("trnpipe", "trnjobs"),
}
TARGETS = ["local", "batch", "sagemaker"]
MODULES = {
    **dict.fromkeys(("submit", "run", "retry", "cancel", "reconcile", "driver"), "submit"),
    **dict.fromkeys(("plan", "fit", "status", "logs", "history", "cost", "report", "config"), "show"),
    "diff": "diff",
    "notify": "notify",
}


_NEWEST, _PRICES = "the newest", "jobs.prices jobs.vcpu_usd_per_hour"
USAGE: dict[str, Usage] = {
    "plan": Usage(("--cycle 2026-11-20", "--target batch --json"), common="jobs.target jobs.train.instance jobs.image"),
    "fit": Usage(("plan.json",), places=""),
    "submit": Usage(
        ("--cycle first", "--config configs/small.toml --target batch", "--cycle first --fresh"),
        common="data.path model.preset model.init_from train.epochs train.start gate.drops jobs.target "
        "jobs.train.instance",
    ),
    "run": Usage(
        ("-- python train.py --lr 1e-3", "--nodes 2 --processes 32 --instance trn1.32xlarge -- python train.py"),
        places="workspace",
    ),
    "status": Usage(("", "--watch", "--cycle first --json"), reads=_PRICES, cycle=_NEWEST),
    "logs": Usage(("train -f", "train --tail 20", "embed:3 --attempt 1"), reads="jobs", cycle=_NEWEST),
    "cancel": Usage(('--cycle first --reason "wrong data"',), reads="jobs", cycle=_NEWEST),
    "retry": Usage(("", "--cycle first"), reads="jobs", cycle=_NEWEST),
    "reconcile": Usage(("", "--cycle first"), reads="jobs", cycle="all open cycles"),
    "history": Usage(("", "--last 50"), reads=_PRICES, places="workspace"),
    "diff": Usage(("", "first second"), reads=_PRICES, places="workspace"),
    "cost": Usage(("", "--last 30"), reads=_PRICES, cycle=_NEWEST),
    "report": Usage(("", "--cycle first"), reads="jobs report", cycle=_NEWEST),
    "notify": Usage(("", "--test"), reads="jobs", places="workspace"),
    "driver": Usage(
        ("--scheduled-time 2026-11-20T02:00:00Z",),
        common="jobs.schedule.expression jobs.schedule.timezone",
        places="workspace",
    ),
    "config": Usage(("--config configs/small.toml", "| grep -v default"), places=""),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (core/errors.py). Only bugs print a traceback."""
    return run_program("trnjobs", COMMANDS, _run, argv)


def _run(name: str, argv: list[str]) -> int:
    from jobs.settings import CycleSettings

    if name == "completion":
        return show(completion("trnjobs", {command: {"": _parser(command)} for command in USAGE}, argv, CycleSettings))
    module = import_module(f"jobs.commands.{MODULES[name]}")
    end = argv.index("--") if name == "run" and "--" in argv else len(argv)
    read = _parser(name).read(argv[:end], CycleSettings)
    if read is None:
        return EXIT_OK
    arguments, resolved = read
    arguments.command = tuple(argv[end + 1 :])
    arguments.resolved, arguments.settings = resolved, resolved.settings
    return int(getattr(module, f"run_{name}")(arguments, show))


def _parser(name: str) -> CommandParser:
    command = "SCRIPT.py [ARGUMENT ...]" if name == "run" else ""
    parser = CommandParser(f"trnjobs {name}", COMMANDS[name], command, USAGE[name])
    add_flags(name, parser)
    return parser


def add_flags(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command. Every other flag is a setting."""
    add = parser.add_argument
    if name in ("plan", "submit", "run", "driver"):
        add("--target", choices=TARGETS, help="overrides jobs.target")
    if name in ("plan", "cost", "status", "config"):
        add("--json", action="store_true", help="print as JSON (plan: the exact requests to the target)")
    match name:
        case "plan":
            add("--diff", action="store_true", help="show differences from the registered job definitions")
        case "config":
            add("--markdown", action="store_true", help="print the reference of all settings, docs/settings.md")
        case "fit":
            add("plan", type=Path, metavar="PLAN.json", help="output of `terraform show -json` for a plan")
        case "submit":
            fresh = "restart a submitted cycle from the beginning, if nothing was trained in it"
            add("--fresh", action="store_true", help=fresh)
        case "run":
            again = "rerun the script from the beginning, with access to the checkpoints of the earlier run"
            add("--again", action="store_true", help=again)
            add("--name", default="", help="recorded as the cycle run-NAME (default: from the script)")
            add("--nodes", type=int, default=0, metavar="N", help="number of machines (default: 1)")
            add("--processes", type=int, default=0, metavar="P", help="ranks per machine (default: 1)")
            add("--instance", default="", help="instance type, such as trn1.32xlarge")
            add("--vcpus", type=int, default=0, metavar="N", help="vCPUs per node (default: all of the instance, or 1)")
            add("--memory-mib", type=int, default=0, metavar="MIB", help="per node (default: the instance's, or 2048)")
            add("--attempts", type=int, default=0, metavar="A", help="maximum number of attempts (default: 3)")
            add("--timeout-s", type=int, default=0, metavar="S", help="time limit of one attempt (default: 24 h)")
            add("--image", default="", help="overrides jobs.image")
            add("--queue", default="", help="overrides jobs.queue")
            add("--role", default="", help="overrides jobs.role")
            add("--environment", type=_variable, action="append", metavar="NAME=VALUE", help="variable (not a secret)")
        case "logs":
            add("job", help="job name as shown by trnjobs status (embed:3 for a child of an array)")
            add("--attempt", type=int, default=0, help="attempt number, from 1 (default: the last)")
            add("--node", type=int, default=0, help="node of a multi-node job, from 0 (the main node)")
            add("-f", "--follow", action="store_true", help="keep printing new lines until the attempt has ended")
            add("--tail", type=_count, metavar="N", help="start with the last N lines")
        case "notify":
            add("--test", action="store_true", help="send a test message to every address first")
        case "cancel":
            add("--reason", default="by hand", help="reason to record with the cycle")
        case "diff":
            add("cycles", nargs="*", metavar="CYCLE", help="two cycles, the earlier one first")
        case "history":
            add("--last", type=_count, default=20, help="number of cycles to show")
        case "cost":
            add("--last", type=_count, metavar="N", help="show the newest N cycles and their success rate")
        case "status":
            add("--watch", action="store_true", help="refresh until the cycle has ended, then exit with its exit code")
            add("--every", type=_seconds, default=5.0, metavar="S", help="seconds between updates (default: 5)")
        case "driver":
            default = "default: TRNJOBS_SCHEDULED_TIME, else the newest scheduled time that has passed"
            add("--scheduled-time", default="", metavar="TIME", help=f"such as 2026-11-20T02:00:00Z ({default})")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}, expected NAME=VALUE")
    return name, value


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} seconds, expected 0.1 to 3600")
    return seconds


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}, expected at least 1")
    return number
