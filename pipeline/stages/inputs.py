"""What stages before this one left: prepared data and its shapes, mined negatives, a checkpoint to start from."""

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
from pipeline.data.token_sets import prefixes_of, read_token_sets, spec_of
from pipeline.model.config import InputSpec
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.registry.checkpoints import locate_start, production_prefix
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.train.config import batch_share
from pipeline.train.graph_trial import Trial

# The checkpoint a cycle starts from, pinned at its first attempt, opened and verified.


def find_parent(ctx: StageContext) -> Checkpoint | None:
    """The verified parent checkpoint; None for scratch, or when nothing was promoted. Raises CheckpointError."""
    settings, cache_dir = ctx.settings, ctx.scratch / "parent"
    if settings.train.start != "incumbent":
        place = locate_start(settings.train.start, settings, ctx.workspace)
        return None if place is None else open_checkpoint(*place, cache_dir)
    # The model that was promoted when this cycle first mined negatives or trained: a promotion in between, even of this
    # very cycle, must not change what a later attempt starts from. The first writer wins, so all ranks agree.
    key = f"cycles/{ctx.cycle}/train/parent.json"
    pin = json.dumps({"checkpoint": production_prefix(ctx.workspace, settings.model_name)})
    ctx.workspace.write_if_absent(key, pin.encode())
    pinned = json.loads(ctx.workspace.read_bytes(key))["checkpoint"]
    return None if pinned is None else open_checkpoint(ctx.workspace, str(pinned), cache_dir)


@dataclass(frozen=True)
class Prepared:
    """Committed folders in the workspace."""

    token_sets: tuple[str, ...]
    """In partition order."""
    tokenizer: str


def find_prepared(ctx: StageContext) -> Prepared | None:
    """The prepared data of this cycle, None when there is none yet."""
    result = ctx.earlier("prepare")
    if result is None:
        return None
    return Prepared(prefixes_of(result.outputs), result.outputs["tokenizer"])


def load_prepared(ctx: StageContext) -> Prepared:
    """The prepared data of this cycle. Raises DataError when there is none yet."""
    prepared = find_prepared(ctx)
    if prepared is None:
        raise DataError(
            f"cycle {ctx.cycle} has no prepared data",
            expected="the result of the prepare stage",
            next_command=f"trnpipe prepare --cycle {ctx.cycle}, with the same settings",
        )
    return prepared


def mined_negatives(ctx: StageContext) -> str | None:
    """Where the negatives lie that were mined in this cycle; None when it has not mined."""
    result = ctx.earlier("mine")
    return None if result is None else result.outputs.get("negatives")


# What decides the shapes of a cycle's graphs beside the training settings: vocabulary, classes, features, buckets.

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
        self,
        settings: Settings,
        backend: Backend,
        process_group: ProcessGroup,
        watch: GraphWatch,
        stop: StopSignal,
        console: Console,
    ) -> Trial:
        """The trial run of these settings, ready to run."""
        return Trial(settings, self.spec, self.buckets, backend, process_group, stop, console, watch)


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
