"""`trnpipe export vectors`: the vectors that are served, or those of a cycle, in the form of another tool."""

from pathlib import Path

from pipeline.command_table import ToolCall
from pipeline.context import open_context
from pipeline.core.errors import EXIT_OK, CheckpointError, ConfigError
from pipeline.core.format import format_bytes
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.embed.forms import open_form
from pipeline.embed.handover import hand_over
from pipeline.embed.vectors import VectorSet, open_vectors
from pipeline.io.storage import Storage
from pipeline.registry.serving import read_pair
from pipeline.settings import Settings

OPTIONS = frozenset({"--to", "--out", "--index"})


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Hand vectors over. Raises ConfigError, CheckpointError, DataError, TransientError, Preempted."""
    if wrong := sorted(call.options.keys() - OPTIONS):
        raise ConfigError(f"{wrong[0]} does not apply to vectors", next_command="trnpipe export vectors --help")
    out = call.options.get("--out", "")
    if not out or "://" in out:
        raise ConfigError(
            f"--out {out or 'is not given'}",
            expected="a local folder: indexes are written in place",
            next_command="--out DIR, and copy it from there",
        )
    folder = Path(out).expanduser().absolute()
    with open_context(settings, stop) as ctx:
        vectors = _vectors(ctx.workspace, settings.model_name, *call.arguments)
        form = open_form(call.options.get("--to", ""), vectors, call.options.get("--index", ""))
        done = hand_over(vectors, form, folder, stop)
    what = f"{done.rows:,} vectors of cycle {vectors.info.cycle} as {form.name}"
    say(f"export: {what}, {'every id read back' if done.fresh else 'done already'}")
    say(f"committed: {done.folder}, {format_bytes(done.size_bytes)}; made with {vectors.info.model.place}")
    return EXIT_OK


def _vectors(workspace: Storage, model: str, cycle: str = "") -> VectorSet:
    """Those of the cycle, or those that are served."""
    if cycle:
        return open_vectors(workspace, cycle)
    served = read_pair(workspace, model)
    if served is None:
        raise ConfigError(
            f"nothing is served of {model} in {workspace.root}",
            expected="a pair that trnpipe embed verify has let be served, or a cycle by name",
            next_command="trnpipe export vectors CYCLE --to FORM --out DIR",
        )
    pair = served[0]
    vectors = open_vectors(workspace, pair.vectors.cycle)
    if vectors.manifest.digest != pair.vectors.digest:
        raise CheckpointError(
            f"{workspace.uri(vectors.prefix)} has digest {vectors.manifest.digest}",
            expected=f"{pair.vectors.digest}, which is served",
            next_command="trnpipe serving rollback --reason TEXT",
        )
    return vectors
