"""`trnpipe doctor`: what these settings need of a Trainium core; `--hlo`: what neuronx-cc would say to their graphs."""

from collections import Counter

from pipeline.backends import open_tracer
from pipeline.commands import ToolCall
from pipeline.compile.lint import lint, lint_counters
from pipeline.compile.watch import Recorder
from pipeline.context import open_context
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import World
from pipeline.settings import Settings
from pipeline.stages.estimates import contrastive_batch, estimate_lines, estimates
from pipeline.stages.inputs import Shapes, shapes_of
from pipeline.telemetry.console import Console
from pipeline.train.config import batch_share


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Estimate, and lint the traced graphs. The exit code: that of ConfigError when something cannot work, else 0.

    Raises ConfigError, Preempted.
    """
    with open_context(settings, stop) as ctx:
        shapes = shapes_of(settings, ctx, say)
    world = World(world_size=settings.launch.processes)
    share = batch_share(settings.train, world.world_size, world.rank)
    found = estimates(settings, shapes, share)
    for line in estimate_lines(found, contrastive_batch(settings.train, share)):
        say(line)
    errors = sum(not one.fits() for one in found.values())
    if "--hlo" in call.switches:
        errors += _lint(settings, shapes, stop, say)
    return ConfigError.exit_code if errors else EXIT_OK


def _lint(settings: Settings, shapes: Shapes, stop: StopSignal, say: Say) -> int:
    """Trace a whole trial run as on one Neuron core, without running any of it. Returns the number of errors."""
    backend = open_tracer()
    recorder = Recorder(backend, shapes.plan(settings, World(), backend.device_name()))
    gang = Gang(World(), timeout_s=settings.train.collective_timeout_s)
    shapes.trial(settings, backend, gang, recorder, stop, Console(quiet=True)).run()
    largest = max(recorder.graphs.values(), key=lambda graph: graph.num_instructions)
    say(
        f"traced {len(recorder.graphs)} graphs, the largest {largest.phase} of {largest.batch_size} x {largest.bucket} "
        f"with {largest.num_instructions:,} operations in {largest.hlo_bytes / 1e6:.1f} MB of text"
    )
    if settings.launch.processes > 1:
        say(
            f"these are one core's: what {settings.launch.processes} ranks exchange in a step is in the graphs that"
            " `trnpipe compile` meets, and lints, on the device"
        )
    findings = (*lint(*recorder.texts.values()), *lint_counters(backend.host_operators()))
    for finding in findings:
        say(str(finding))
    count = Counter(finding.severity for finding in findings)
    say(f"lint: {count['error']} errors, {count['warning']} warnings")
    return count["error"]
