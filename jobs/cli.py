"""The `trnjobs` command, which runs the jobs of a cycle and reports on them."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from pipeline.command_line import COMPLETION, CommandParser, Usage, completion, run_program, show
from pipeline.core.errors import EXIT_OK

# Each command is implemented by a function `run_<name>(arguments, say)`, which returns the exit code. MODULES maps the
# command to its module in jobs/commands. The settings of the cycle are passed as `arguments.settings`.
COMMANDS: dict[str, str] = {
    "submit": "Run a cycle locally, on AWS Batch or on SageMaker. It is safe to repeat: no job is started twice.",
    "status": "Show the jobs of a cycle.",
    "logs": "Show the log of a job. By default, this is the last attempt on the main node.",
    "history": "List the cycles of a workspace.",
    "diff": "Compare the settings, data and metrics of two cycles. By default, these are the newest two.",
    "report": "Write the HTML page of a cycle, reports/<cycle>.html. It is also written whenever a cycle ends.",
    "retry": "Resume a failed or interrupted cycle. Unfinished jobs are run with the settings of the submission.",
    "cancel": "Cancel all unfinished jobs of a cycle, beginning with the last one.",
    "run": "Run a script as a job, for example -- python train.py. It gets ranks and retries like a stage.",
    "plan": "Show the jobs of a cycle with their size, limits, time and cost. --json shows the exact requests.",
    "cost": "Show the time and cost of a cycle by stage. --last N shows several cycles and their success rate.",
    "fit": "Check that Terraform will create what a cycle needs. This covers the schedule, limits and capacity.",
    "driver": "Start the cycle that is due, unless it was started before. This is the entry point of the scheduler.",
    "reconcile": "Record job states and close cycles that have ended. --cycle limits this to a single cycle.",
    "notify": "Send pending notifications. --test first sends a test message to every address.",
    "mirror": "Copy a cycle to MLflow or OpenLineage, where repeating the command adds nothing twice.",
    "config": "Print every setting with its value and source, including those in [jobs].",
    "completion": COMPLETION.replace("trnpipe", "trnjobs"),
}
TARGETS = ["local", "batch", "sagemaker"]
MIRRORS = ["mlflow", "openlineage"]
MODULES = {
    **dict.fromkeys(("submit", "run", "retry", "cancel", "reconcile", "driver"), "submit"),
    **dict.fromkeys(("plan", "fit", "status", "logs", "history", "cost", "report", "config"), "show"),
    "diff": "diff",
    "notify": "notify",
    "mirror": "mirror",
}


_NEWEST, _PRICES = "the newest cycle", "jobs.prices jobs.vcpu_usd_per_hour"
USAGE: dict[str, Usage] = {
    "plan": Usage(("--cycle 2026-11-20", "--target batch --json"), common="jobs.target jobs.train.instance jobs.image"),
    "fit": Usage(("plan.json",), scope=""),
    "submit": Usage(
        ("--cycle first", "--config configs/small.toml --target batch", "--cycle first --fresh"),
        common="data.path model.preset model.init_from train.epochs train.start gate.drops jobs.target "
        "jobs.train.instance",
    ),
    "run": Usage(
        ("-- python train.py --lr 1e-3", "--nodes 2 --processes 32 --instance trn1.32xlarge -- python train.py"),
        scope="workspace",
    ),
    "status": Usage(("", "--watch", "--cycle first --json"), reads=_PRICES, cycle=_NEWEST),
    "logs": Usage(("train -f", "train --tail 20", "embed:3 --attempt 1"), reads="jobs", cycle=_NEWEST),
    "cancel": Usage(('--cycle first --reason "wrong data"',), reads="jobs", cycle=_NEWEST),
    "retry": Usage(("", "--cycle first"), reads="jobs", cycle=_NEWEST),
    "reconcile": Usage(("", "--cycle first"), reads="jobs", cycle="all open cycles"),
    "history": Usage(("", "--last 50"), reads=_PRICES, scope="workspace"),
    "diff": Usage(("", "first second"), reads=_PRICES, scope="workspace"),
    "cost": Usage(("", "--last 30"), reads=_PRICES, cycle=_NEWEST),
    "report": Usage(("", "--cycle first"), reads="jobs report", cycle=_NEWEST),
    "notify": Usage(("", "--test"), reads="jobs", scope="workspace"),
    "mirror": Usage(("--to mlflow", "--to openlineage --all"), reads="jobs", cycle=_NEWEST),
    "driver": Usage(
        ("--scheduled-time 2026-11-20T02:00:00Z",),
        common="jobs.schedule.expression jobs.schedule.timezone",
        scope="workspace",
    ),
    "config": Usage(("--config configs/small.toml", "| grep -v default"), scope=""),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (see core/errors.py). A traceback is only printed for bugs."""
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
    """Add the flags of a command to its parser. All other flags are settings."""
    add = parser.add_argument
    if name in ("plan", "submit", "run", "driver"):
        add("--target", choices=TARGETS, help="override jobs.target")
    if name in ("plan", "cost", "status", "config"):
        add("--json", action="store_true", help="print JSON")
    match name:
        case "plan":
            add("--diff", action="store_true", help="show differences from the registered job definitions")
        case "config":
            add("--markdown", action="store_true", help="print the reference of all settings as Markdown")
        case "fit":
            add("plan", type=Path, metavar="PLAN.json", help="a plan as printed by `terraform show -json`")
        case "submit":
            fresh = "restart a submitted cycle from the beginning, unless it has trained a model"
            add("--fresh", action="store_true", help=fresh)
        case "run":
            again = "run the script again, with access to the checkpoints of the earlier run"
            add("--again", action="store_true", help=again)
            add("--name", default="", help="run as the cycle run-NAME (default: the name of the script)")
            add("--nodes", type=int, metavar="N", help="number of nodes (default: 1)")
            add("--processes", type=int, metavar="P", help="ranks per node (default: 1)")
            add("--instance", help="instance type, such as trn1.32xlarge")
            add("--vcpus", type=int, metavar="N", help="vCPUs per node (default: all of the instance, or 1)")
            add("--memory-mib", type=int, metavar="MIB", help="memory per node (default: all, or 2048)")
            add("--attempts", type=int, metavar="A", help="maximum number of attempts (default: 3)")
            add("--timeout-s", type=int, metavar="S", help="time limit of an attempt (default: 24 h)")
            add("--image", help="override jobs.image")
            add("--queue", help="override jobs.queue")
            add("--role", help="override jobs.role")
            text = "environment variable to set (not for secrets)"
            add("--environment", type=variable, action="append", metavar="NAME=VALUE", help=text)
        case "logs":
            add("job", help="name as shown by trnjobs status, such as train, or embed:3 for a task of an array job")
            add("--attempt", type=int, default=0, help="attempt number, starting at 1 (default: the last attempt)")
            add("--node", type=int, default=0, help="node of a multi-node job (default: 0, the main node)")
            add("-f", "--follow", action="store_true", help="keep printing new lines until the attempt has ended")
            add("--tail", type=count, metavar="N", help="start with the last N lines")
        case "notify":
            add("--test", action="store_true", help="send a test message to every address first")
        case "mirror":
            add("--to", choices=MIRRORS, required=True, help="where to copy to, as configured in its own environment")
            add("--all", action="store_true", help="copy all cycles of the workspace")
        case "cancel":
            add("--reason", default="by hand", help="reason to record with the cycle")
        case "diff":
            add("cycles", nargs="*", metavar="CYCLE", help="two cycles to compare, with the earlier one first")
        case "history":
            add("--last", type=count, default=20, metavar="N", help="number of cycles to show (default: 20)")
        case "cost":
            add("--last", type=count, metavar="N", help="show the newest N cycles and their success rate")
        case "status":
            add("--watch", action="store_true", help="refresh until the cycle has ended, then exit with its exit code")
            add("--every", type=seconds, default=5.0, metavar="S", help="seconds between updates (default: 5)")
        case "driver":
            default = "default: TRNJOBS_SCHEDULED_TIME, or else the most recent scheduled time"
            add("--scheduled-time", default="", metavar="TIME", help=f"such as 2026-11-20T02:00:00Z ({default})")


def variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}, expected NAME=VALUE")
    return name, value


def seconds(text: str) -> float:
    number = float(text)
    if not 0.1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"{text} seconds, expected 0.1 to 3600")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}, expected at least 1")
    return number
