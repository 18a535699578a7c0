"""The `trnjobs` command: its table of commands."""

from collections.abc import Sequence
from importlib import import_module

from pipeline.command_line import CommandParser, Program, show
from pipeline.core.errors import EXIT_OK

# A command is `jobs/commands/<name>.py` with `add_arguments(parser)` and `run(arguments, say) -> exit code`.
# It finds the settings of the cycle in `arguments.settings`.
COMMANDS: dict[str, str] = {
    "plan": "the jobs of a cycle: sizes, limits, expected duration and dollars; --json: the exact requests",
    "fit": "would a cycle run on what Terraform is about to make: schedule, limits, room for every job",
    "submit": "hand the jobs over, here or to AWS Batch; run again after any stop, none is started twice",
    "status": "the jobs of a cycle now",
    "logs": "what a try of a job said, on any of its nodes",
    "cancel": "end what is left of a cycle, from the last job backwards",
    "retry": "once more: the jobs that failed, and those after them",
    "reconcile": "put on record what became of the jobs of a cycle, or of all under way, and close what has ended",
    "history": "the cycles of a workspace",
    "cost": "where the time and the money of a cycle went; --last N: several, with their success rate",
    "report": "write the page of a cycle, reports/<cycle>.html; done at every end of a cycle, too",
    "driver": "what the scheduler starts: the cycle that is due, once; missed and late ones by policy",
    "config": "every setting with its value and source, those under [jobs] included",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The result is the exit code of pipeline/core/errors.py; only bugs show a traceback."""
    return Program("trnjobs", COMMANDS, _run)(argv)


def _run(name: str, words: list[str]) -> int:
    from jobs.settings import CycleSettings

    command = import_module(f"jobs.commands.{name}")
    parser = CommandParser(f"trnjobs {name}", COMMANDS[name])
    command.add_arguments(parser)
    read = parser.read(words, CycleSettings)
    if read is None:
        return EXIT_OK
    arguments, resolved = read
    arguments.resolved, arguments.settings = resolved, resolved.settings
    return int(command.run(arguments, show))
