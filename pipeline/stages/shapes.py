"""What decides the shapes of a cycle's graphs beside the training settings: vocabulary, classes, features, buckets."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from pipeline.backends import Backend
from pipeline.compile.manifest import Plan
from pipeline.compile.plan import evaluation_plan, graph_plan
from pipeline.compile.watch import GraphWatch
from pipeline.context import StageContext
from pipeline.core.batching import Bucket, RankShare
from pipeline.core.footprint import ContrastiveBatch, EncoderSizes, Estimate, MeasuredTexts, Workload, estimate
from pipeline.core.format import format_bytes
from pipeline.core.stop import StopSignal
from pipeline.data.lexical import numeric_names
from pipeline.data.tokens import read_token_sets, spec_of
from pipeline.model.config import InputSpec
from pipeline.model.factory import FactoryEncoder
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import World
from pipeline.settings import Settings
from pipeline.stages.inputs import find_prepared
from pipeline.telemetry.console import Console
from pipeline.train.config import TrainConfig, batch_share, groups_of_batch, needs_two_passes, rows_of_batch
from pipeline.train.trial import Trial

ASSUMED_CLASSES = 4
"""As in ESCI and in the built-in catalogue, where data.labels does not tell."""


@dataclass(frozen=True)
class Shapes:
    """Inputs of the model, and the static shapes of its batches."""

    spec: InputSpec
    buckets: tuple[Bucket, ...]

    def plan(self, settings: Settings, world: World, device: str) -> Plan:
        """What a run of these settings on `world` ranks of `device` must share with another to share its graphs."""
        return graph_plan(
            settings, self.spec, self.buckets, batch_share(settings.train, world.world_size, world.rank), device
        )

    def scoring_plan(self, settings: Settings, world_size: int, device: str) -> Plan:
        """The same for evaluation and embedding alone."""
        return evaluation_plan(settings, self.spec, self.buckets, world_size, device)

    def trial(
        self, settings: Settings, backend: Backend, gang: Gang, watch: GraphWatch, stop: StopSignal, console: Console
    ) -> Trial:
        """The trial run of these settings, ready to run."""
        return Trial(settings, self.spec, self.buckets, backend, gang, stop, console, watch)


def shapes_of(settings: Settings, ctx: StageContext, say: Callable[[str], object]) -> Shapes:
    """Those of this cycle's prepared data; before there is any, those that the settings will give it. Raises DataError.

    `say` is told what was assumed. Graphs of other shapes than the data's are refused by the guard of training.
    """
    prepared = find_prepared(ctx)
    if prepared is None:
        shapes = expected_shapes(settings)
        say(
            f"nothing is prepared yet: assuming a vocabulary of {shapes.spec.vocab_size:,} and "
            f"{shapes.spec.num_classes} classes"
        )
        return shapes
    info = read_token_sets(ctx.workspace, prepared.token_sets)[0].info
    return Shapes(spec_of(info), tuple(Bucket.parse(text) for text in info.buckets))


def expected_shapes(settings: Settings) -> Shapes:
    """Those that data prepared with these settings will have: a full vocabulary, and four classes unless told."""
    data = settings.data
    labels = data.labels or tuple(f"class {i}" for i in range(ASSUMED_CLASSES))
    spec = InputSpec(
        vocab_size=data.tokenizer.vocab_size,
        pad_id=0,
        labels=labels,
        label_gains=tuple(i / (len(labels) - 1) for i in range(len(labels))),
        numeric=numeric_names(data),
        categorical_ids=tuple(feature.num_ids for feature in data.categorical),
        query_prefix=data.query_prefix,
        product_prefix=data.product_prefix,
    )
    return Shapes(spec, tuple(Bucket.parse(text) for text in data.buckets))


# Will the model fit on a core, and how long will a step take: core/footprint.py for these settings.


def estimates(settings: Settings, shapes: Shapes, share: RankShare) -> dict[int, Estimate]:
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
        found = Workload.of_groups(
            samples,
            length,
            slots=slots,
            mined=mined,
            accumulation=share.accumulation,
            precision=settings.train.precision,
            moments=3 if settings.train.average_decay else 2,
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
        return replace(found, passes=(), measured=MeasuredTexts(texts, *cost))

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
        for length in rows_of_batch(settings.train, shapes.buckets)
    }


def contrastive_batch(train: TrainConfig, share: RankShare) -> ContrastiveBatch | None:
    """What the contrastive loss of a step is computed over, on Neuron, whose ranks gather within the graph."""
    if not train.loss.contrastive_weight:
        return None
    groups = groups_of_batch(train)
    slots = train.candidates_per_query + train.mined_per_query
    return ContrastiveBatch(groups, groups * slots, needs_two_passes(train, share, gathers_in_graph=True))


def estimate_lines(found: dict[int, Estimate], contrastive: ContrastiveBatch | None) -> list[str]:
    """A table: what takes memory on one core, and the step, by length of rows. `contrastive`: as estimated with."""
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
