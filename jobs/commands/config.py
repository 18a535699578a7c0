"""`trnjobs config`: every setting of the pipeline and of its jobs, with its value and source."""

import argparse

from jobs.settings import SCHEMA
from pipeline.core.errors import EXIT_OK
from pipeline.core.progress import Say
from pipeline.settings_text import as_json, flags_text, table_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="for machines")
    shown.add_argument("--flags", action="store_true", help="every setting with its default and a line of help")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Show; nothing is changed."""
    if arguments.flags:
        say(flags_text(SCHEMA.fields))
    else:
        say(as_json(arguments.resolved) if arguments.json else table_text(arguments.resolved, SCHEMA.fields))
    return EXIT_OK
