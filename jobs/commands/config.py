"""`trnjobs config`: every setting of the pipeline and of its jobs, with its value and source."""

import argparse

from pipeline.core.errors import EXIT_OK
from pipeline.core.progress import Say
from pipeline.settings import as_json, table_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Show; nothing is changed."""
    say(as_json(arguments.resolved) if arguments.json else table_text(arguments.resolved))
    return EXIT_OK
