"""`trnpipe tune`: search training settings by real training runs, and write the best ones down."""

import os

from pipeline.commands import ToolCall
from pipeline.compile.neuron import use_neuron_cache
from pipeline.context import open_context
from pipeline.core.errors import EXIT_OK
from pipeline.core.optional import missing_package
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.settings import Settings


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Carry out the search, or what is left of it. Raises TrnpipeError."""
    try:
        from pipeline.tune.study import BEST, TABLE, lines_of, run_study, study_folder
    except ImportError as error:
        raise missing_package("optuna", "trnpipe tune", error) from error

    with open_context(settings, stop) as ctx:
        warning = use_neuron_cache(settings.compile, settings.workspace, settings.backend, os.environ)
        if warning:
            ctx.console.warn(warning)
        table = run_study(settings, ctx)
        folder = study_folder(settings, ctx)
    for line in lines_of(table):
        say(line)
    say(f"table {folder / TABLE}")
    if table.best is not None:
        say(f"best settings {folder / BEST}: give it to trnpipe train as the last --config")
    if table.num_running:
        say(f"{table.num_running} trials are running in other processes; the last one writes the complete table")
    return EXIT_OK
