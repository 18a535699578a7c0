"""`trnpipe doctor`: what these settings need of a Trainium core; `--hlo`: what neuronx-cc would say to their graphs."""

from collections import Counter
from dataclasses import replace

import torch
from torch import nn

from pipeline.backends import open_tracer
from pipeline.commands import ToolCall
from pipeline.compile.hlo import lint, lint_counters
from pipeline.compile.manifest import Recorder
from pipeline.context import open_context
from pipeline.core.batch_order import RankSlice
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.core.footprint import ContrastiveBatch, EncoderSizes, Estimate, MeasuredTexts, Workload, estimate
from pipeline.core.format import format_bytes
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.model.factory import FactoryEncoder
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.settings import Settings
from pipeline.stages.inputs import Shapes, shapes_of
from pipeline.telemetry.console import Console
from pipeline.train.config import TrainConfig, batch_lengths, groups_per_batch, needs_two_passes, rank_slice


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Estimate, and lint the traced graphs. The exit code: that of ConfigError when something cannot work, else 0.

    Raises ConfigError, Preempted.
    """
    with open_context(settings, stop) as ctx:
        shapes = shapes_of(settings, ctx, say)
    world = World(world_size=settings.launch.processes)
    share = rank_slice(settings.train, world.world_size, world.rank)
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
    process_group = ProcessGroup(World(), timeout_s=settings.train.collective_timeout_s)
    shapes.trial(settings, backend, process_group, recorder, stop, Console(quiet=True)).run()
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


# Will the model fit on a core, and how long will a step take: core/footprint.py for settings and shapes.


def estimates(settings: Settings, shapes: Shapes, share: RankSlice) -> dict[int, Estimate]:
    """One for each length of rows of training. Raises ConfigError for an instance that is not known."""
    with torch.device("meta"):  # sizes only
        model = RelevanceModel(settings.model, shapes.spec)
    size = settings.model.encoder
    encoder = EncoderSizes(
        vocab=shapes.spec.vocab_size,
        positions=settings.model.max_positions,
        layers=size.num_layers,
        width=size.hidden_size,
        heads=size.num_heads,
        intermediate=size.intermediate_size,
    )
    samples = settings.train.global_batch_size // share.world_size // share.accumulation
    heads = (model.interactions, model.head)
    contrastive, parallel = contrastive_batch(settings.train, share), settings.train.parallel
    slots, mined = settings.train.candidates_per_query, settings.train.mined_per_query

    def workload(length: int) -> Workload:
        found = Workload.for_groups(
            samples,
            length,
            slots=slots,
            mined=mined,
            accumulation=share.accumulation,
            precision=settings.train.precision,
            dropout=settings.model.dropout > 0,
            contrastive=contrastive,
            recompute=parallel.recompute == "units",
            token_match=settings.model.token_match,
            shards=(parallel.shard_degree or share.world_size) if parallel.shard == "state" else 1,
        )
        if not isinstance(model.encoder, FactoryEncoder):
            return found
        texts = samples // slots * (1 + slots + mined)
        longest = max(side for one in shapes.buckets for side in (one.query_tokens, one.product_tokens))
        cost = model.encoder.cost_of_text(min(length, longest))
        return replace(found, rows=0, measured=MeasuredTexts(texts, *cost))

    return {
        length: estimate(
            sum(parameter.numel() for parameter in model.parameters()),
            encoder,
            workload(length),
            instance=settings.estimate.instance,
            mfu=settings.estimate.mfu,
            sample_parameters=sum(
                module.weight.numel() for head in heads for module in head.modules() if isinstance(module, nn.Linear)
            ),
        )
        for length in batch_lengths(settings.train, shapes.buckets)
    }


def contrastive_batch(train: TrainConfig, share: RankSlice) -> ContrastiveBatch | None:
    """Return what the contrastive loss of a step is computed over, on Neuron, whose ranks gather within the graph."""
    if not train.loss.contrastive_weight:
        return None
    groups = groups_per_batch(train)
    slots = train.candidates_per_query + train.mined_per_query
    return ContrastiveBatch(groups, groups * slots, needs_two_passes(train, share, gathers_in_graph=True))


def estimate_lines(found: dict[int, Estimate], contrastive: ContrastiveBatch | None) -> list[str]:
    """Return a table: memory on one core, and the step, by length of rows. `contrastive`: as estimated with."""
    first = next(iter(found.values()))
    sizes = first.footprint
    lines = [
        f"one core of {first.instance.name} ({format_bytes(first.instance.core_memory_bytes)}), estimated from sizes:",
        f"  parameters {sizes.master_bytes // 4 / 1e6:.1f}M | weights {format_bytes(sizes.parameter_bytes)} | "
        f"optimizer {format_bytes(sizes.optimizer_bytes)} | gradients {format_bytes(sizes.gradient_bytes)}",
    ]
    if contrastive is not None:
        passes = "two forward passes and one backward pass" if contrastive.two_passes else "one pass"
        lines.append(
            f"  contrastive loss of {contrastive.queries:,} queries and {contrastive.products:,} products: {passes} a"
            f" step, up to {format_bytes(max(one.footprint.contrastive_bytes for one in found.values()))} more"
        )
    for length, one in found.items():
        verdict = "fits" if one.fits() else "DOES NOT FIT with 20 % kept free"
        activations = one.footprint.activation_bytes + one.footprint.workspace_bytes
        lines.append(
            f"  {f'rows of {length}':<12} activations {format_bytes(activations):>10} | peak "
            f"{format_bytes(one.footprint.peak_bytes):>10} ({one.memory_share:.0%}, {verdict}) | "
            f"{one.flops / 1e12:.3g} TFLOP a step, {one.step_s * 1e3:.3g} ms at {one.mfu:.0%} MFU"
        )
    return lines
