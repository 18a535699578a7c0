"""`trnpipe doctor`, which estimates memory and time on a Trainium core, and lints graphs for neuronx-cc (`--hlo`)."""

from collections import Counter
from dataclasses import replace
from tempfile import TemporaryDirectory

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
from pipeline.io.paths import temporary_folder
from pipeline.io.storage import open_storage
from pipeline.model.factory import FactoryEncoder
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.settings import Settings
from pipeline.stages.inputs import Shapes, shapes_of
from pipeline.telemetry.console import Console
from pipeline.train.config import TrainConfig, batch_lengths, groups_per_batch, needs_two_passes, rank_slice


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Print the estimates and, if requested, lint the traced graphs.

    Returns the exit code of ConfigError if the model would not fit or compile. Raises ConfigError, Preempted.
    """
    with TemporaryDirectory(dir=temporary_folder()) as folder:
        root = open_storage(settings.workspace, retry=settings.storage, stop=stop).local_path("")
        exists = root is None or root.exists()  # otherwise, do not create it
        with open_context(settings if exists else settings.model_copy(update={"workspace": folder}), stop) as ctx:
            shapes = shapes_of(settings, ctx, say)
    world = World(world_size=settings.launch.processes)
    share = rank_slice(settings.train, world.world_size, world.rank)
    by_length = estimates(settings, shapes, share)
    for line in estimate_lines(by_length, contrastive_batch(settings.train, share)):
        say(line)
    errors = sum(not each.fits() for each in by_length.values())
    if "--hlo" in call.switches:
        errors += _lint(settings, shapes, stop, say)
    return ConfigError.exit_code if errors else EXIT_OK


def _lint(settings: Settings, shapes: Shapes, stop: StopSignal, say: Say) -> int:
    """Lint the graphs of a trial run, which is traced as if on a Neuron core but not executed.

    Returns the number of errors.
    """
    backend = open_tracer()
    recorder = Recorder(backend, shapes.plan(settings, World(), backend.device_name()))
    process_group = ProcessGroup(World(), timeout_s=settings.train.collective_timeout_s)
    shapes.trial(settings, backend, process_group, recorder, stop, Console(quiet=True)).run()
    largest = max(recorder.graphs.values(), key=lambda graph: graph.num_instructions)
    say(
        f"traced {len(recorder.graphs)} graphs, the largest of which is {largest.phase} with batch "
        f"{largest.batch_size} x {largest.bucket} ({largest.num_instructions:,} operations, "
        f"{largest.hlo_bytes / 1e6:.1f} MB of HLO text)"
    )
    if settings.launch.processes > 1:
        say(
            f"these are the graphs of a single core. On the device, `trnpipe compile` lints the graphs of"
            f" {settings.launch.processes} ranks, including their collectives"
        )
    findings = (*lint(*recorder.texts.values()), *lint_counters(backend.host_operators()))
    for finding in findings:
        say(str(finding))
    count = Counter(finding.severity for finding in findings)
    say(f"lint: {count['error']} errors, {count['warning']} warnings")
    return count["error"]


# Estimates of memory and step time on one core, based on core/footprint.py.


def estimates(settings: Settings, shapes: Shapes, share: RankSlice) -> dict[int, Estimate]:
    """Estimate memory and time for each row length that occurs in training.

    Raises ConfigError if the instance type is unknown.
    """
    with torch.device("meta"):  # don't allocate parameters
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
        work = Workload.for_groups(
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
            return work
        texts = samples // slots * (1 + slots + mined)
        longest = max(side for bucket in shapes.buckets for side in (bucket.query_tokens, bucket.product_tokens))
        cost = model.encoder.cost_of_text(min(length, longest))
        return replace(work, rows=0, measured=MeasuredTexts(texts, *cost))

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
    """Return the batch sizes of the contrastive loss on Neuron, where embeddings are gathered within the graph.

    Returns None if the loss is not used.
    """
    if not train.loss.contrastive_weight:
        return None
    groups = groups_per_batch(train)
    slots = train.candidates_per_query + train.mined_per_query
    return ContrastiveBatch(groups, groups * slots, needs_two_passes(train, share, gathers_in_graph=True))


def estimate_lines(by_length: dict[int, Estimate], contrastive: ContrastiveBatch | None) -> list[str]:
    """Format the estimates as a table with memory and step time for each row length."""
    first = next(iter(by_length.values()))
    sizes = first.footprint
    lines = [
        f"estimates for one core of {first.instance.name} ({format_bytes(first.instance.core_memory_bytes)}):",
        f"  parameters {sizes.master_bytes // 4 / 1e6:.1f}M | weights {format_bytes(sizes.parameter_bytes)} | "
        f"optimizer {format_bytes(sizes.optimizer_bytes)} | gradients {format_bytes(sizes.gradient_bytes)}",
    ]
    if contrastive is not None:
        passes = "two forward passes and one backward pass" if contrastive.two_passes else "one pass"
        lines.append(
            f"  contrastive loss with {contrastive.queries:,} queries and {contrastive.products:,} products: {passes}"
            f" per step, up to {format_bytes(max(each.footprint.contrastive_bytes for each in by_length.values()))}"
            " of additional memory"
        )
    for length, each in by_length.items():
        verdict = "fits" if each.fits() else "DOES NOT FIT with 20 % kept free"
        activations = each.footprint.activation_bytes + each.footprint.workspace_bytes
        lines.append(
            f"  {f'rows of {length}':<12} activations {format_bytes(activations):>10} | peak "
            f"{format_bytes(each.footprint.peak_bytes):>10} ({each.memory_share:.0%}, {verdict}) | "
            f"{each.flops / 1e12:.3g} TFLOP per step, {each.step_s * 1e3:.3g} ms at {each.mfu:.0%} MFU"
        )
    return lines
