"""Inputs of a stage: prepared data and its shapes, mined negatives, the parent checkpoint."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.compile.identity import evaluation_plan, graph_plan
from pipeline.compile.manifest import GraphWatch, Plan
from pipeline.context import StageContext
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import DataError
from pipeline.core.stop import StopSignal
from pipeline.data.lexical import numeric_names
from pipeline.data.token_sets import read_token_sets, spec_of, token_set_prefixes
from pipeline.model.config import InputSpec
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.registry.checkpoints import locate_start, production_prefix
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.train.config import rank_slice
from pipeline.train.graph_trial import Trial


def find_parent(ctx: StageContext) -> Checkpoint | None:
    """Open the checkpoint to start from. None for scratch, or if nothing was promoted. Raises CheckpointError."""
    settings, cache_dir = ctx.settings, ctx.scratch / "parent"
    if settings.train.start != "incumbent":
        location = locate_start(settings.train.start, settings, ctx.workspace)
        return None if location is None else open_checkpoint(*location, cache_dir)
    # Start from the production model at the time this cycle first mined negatives or trained. A later promotion, even
    # by this cycle, must not change the parent of a later attempt. The first writer wins, so all ranks agree.
    key = f"cycles/{ctx.cycle}/train/parent.json"
    pin = json.dumps({"checkpoint": production_prefix(ctx.workspace, settings.model_name)})
    ctx.workspace.write_if_absent(key, pin.encode())
    pinned = json.loads(ctx.workspace.read_bytes(key))["checkpoint"]
    return None if pinned is None else open_checkpoint(ctx.workspace, str(pinned), cache_dir)


@dataclass(frozen=True)
class Prepared:
    """Prefixes of the prepared data in the workspace. Token sets are in partition order."""

    token_sets: tuple[str, ...]
    tokenizer: str


def find_prepared(ctx: StageContext) -> Prepared | None:
    """Return the prepared data of this cycle, or None if it was not prepared yet."""
    result = ctx.earlier("prepare")
    if result is None:
        return None
    return Prepared(token_set_prefixes(result.outputs), result.outputs["tokenizer"])


def load_prepared(ctx: StageContext) -> Prepared:
    """Return the prepared data of this cycle. Raises DataError if it was not prepared yet."""
    prepared = find_prepared(ctx)
    if prepared is None:
        raise DataError(
            f"cycle {ctx.cycle} has no prepared data",
            expected="the result of the prepare stage",
            next_command=f"trnpipe prepare --cycle {ctx.cycle} with the same settings",
        )
    return prepared


def mined_negatives(ctx: StageContext) -> str | None:
    """Return the prefix of the negatives mined in this cycle, or None if it has not mined any."""
    result = ctx.earlier("mine")
    return None if result is None else result.outputs.get("negatives")


ASSUMED_CLASSES = 4  # number of classes assumed without data.labels, as in ESCI and in the built-in catalogue


@dataclass(frozen=True)
class Shapes:
    """Data properties that determine the shapes of graphs: model inputs and batch buckets."""

    spec: InputSpec
    buckets: tuple[Bucket, ...]

    def plan(self, settings: Settings, world: World, device: str) -> Plan:
        """Return the plan of a training run. Runs with equal plans share their graphs."""
        return graph_plan(
            settings, self.spec, self.buckets, rank_slice(settings.train, world.world_size, world.rank), device
        )

    def scoring_plan(self, settings: Settings, world_size: int, device: str) -> Plan:
        """Return the plan of evaluation and embedding alone."""
        return evaluation_plan(settings, self.spec, self.buckets, world_size, device)

    def trial(
        self,
        settings: Settings,
        backend: Backend,
        process_group: ProcessGroup,
        watch: GraphWatch,
        stop: StopSignal,
        console: Console,
    ) -> Trial:
        """Build the trial run of these settings."""
        return Trial(settings, self.spec, self.buckets, backend, process_group, stop, console, watch)


def shapes_of(settings: Settings, ctx: StageContext, warn: Callable[[str], object]) -> Shapes:
    """Return the shapes of the prepared data, or those expected from the settings if nothing is prepared yet.

    `warn` is called with the assumptions. If they are wrong, the graph guard of training refuses. Raises DataError.
    """
    prepared = find_prepared(ctx)
    if prepared is None:
        shapes = expected_shapes(settings)
        warn(
            f"no prepared data yet: assuming a vocabulary of {shapes.spec.vocab_size:,} and "
            f"{shapes.spec.num_classes} classes"
        )
        return shapes
    info = read_token_sets(ctx.workspace, prepared.token_sets)[0].info
    return Shapes(spec_of(info), tuple(Bucket.parse(text) for text in info.buckets))


def expected_shapes(settings: Settings) -> Shapes:
    """Return the shapes expected from the settings: a full vocabulary, and four classes by default."""
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
