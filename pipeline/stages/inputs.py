"""Look up the inputs of a stage: the prepared data and its shapes, mined negatives, and the parent checkpoint."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.compile.identity import evaluation_plan, graph_plan
from pipeline.compile.manifest import GraphWatch, Plan
from pipeline.context import StageContext
from pipeline.core.batch_order import LONGEST, Bucket
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.stop import StopSignal
from pipeline.data.buckets import given_buckets, pinned_buckets
from pipeline.data.lexical import numeric_names
from pipeline.data.token_sets import read_token_sets, spec_of, token_set_prefixes
from pipeline.model.config import LEXICAL, InputSpec
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.registry.checkpoints import locate_start, parent_buckets, parent_inputs, production_prefix
from pipeline.settings import Settings
from pipeline.teach.teacher import find_teacher
from pipeline.telemetry.console import Console
from pipeline.train.config import rank_slice
from pipeline.train.graph_trial import Trial


def find_parent(ctx: StageContext) -> Checkpoint | None:
    """Open the checkpoint that training starts from.

    Returns None if the model should be trained from scratch, or if no model has been promoted yet. Raises
    CheckpointError if the checkpoint cannot be opened.
    """
    settings, cache_dir = ctx.settings, ctx.scratch / "parent"
    if settings.train.start != "incumbent":
        location = locate_start(settings.train.start, settings, ctx.workspace)
        return None if location is None else open_checkpoint(*location, cache_dir)
    # Record which model is in production when this cycle first needs its parent, and use the same parent from then on.
    # Otherwise, a promotion (even of this cycle's candidate) would change the parent of later attempts. If several
    # ranks write at the same time, the first one wins, which ensures that they all use the same parent.
    key = f"cycles/{ctx.cycle}/train/parent.json"
    pin = json.dumps({"checkpoint": production_prefix(ctx.workspace, settings.model_name)})
    ctx.workspace.write_if_absent(key, pin.encode())
    pinned = json.loads(ctx.workspace.read_bytes(key))["checkpoint"]
    return None if pinned is None else open_checkpoint(ctx.workspace, str(pinned), cache_dir)


@dataclass(frozen=True)
class Prepared:
    """Where the prepared data is in the workspace. `token_sets` are prefixes in the order of partitions."""

    token_sets: tuple[str, ...]
    tokenizer: str


def find_prepared(ctx: StageContext) -> Prepared | None:
    """Return the prepared data of this cycle, or None if it has not been prepared yet."""
    result = ctx.earlier("prepare")
    if result is None:
        return None
    return Prepared(token_set_prefixes(result.outputs), result.outputs["tokenizer"])


def load_prepared(ctx: StageContext) -> Prepared:
    """Return the prepared data of this cycle. Raises DataError if it has not been prepared yet."""
    prepared = find_prepared(ctx)
    if prepared is None:
        raise DataError(
            f"cycle {ctx.cycle} has no prepared data",
            expected="the result of the prepare stage",
            next_command=f"trnpipe prepare --cycle {ctx.cycle} with the same settings",
        )
    return prepared


def mined_negatives(ctx: StageContext) -> str | None:
    """Return the prefix of the negatives that this cycle has mined, or None if it has not mined any."""
    result = ctx.earlier("mine")
    return None if result is None else result.outputs.get("negatives")


def taught_outputs(ctx: StageContext) -> Mapping[str, str] | None:
    """Return the prefixes of what the teacher has computed in this cycle, or None if there is no result.

    Raises ConfigError if it was a different teacher.
    """
    result, teacher = ctx.earlier("teach"), ctx.settings.train.teacher
    if result is None or not teacher:
        return None
    used = result.inputs.get("train.teacher", teacher)  # earlier versions did not store it
    if used != teacher:
        raise ConfigError(
            f"train.teacher is {teacher!r}, but the teacher of cycle {ctx.cycle} was {used!r}",
            expected="the same teacher as in trnpipe teach",
            next_command=f"trnpipe teach --cycle {ctx.cycle}, with the settings of this run",
        )
    return result.outputs


ASSUMED_CLASSES = 4  # number of labels to assume if data.labels is not set, as in ESCI and the built-in catalogue


@dataclass(frozen=True)
class Shapes:
    """The properties of the data that graphs depend on, which are the model inputs and the batch buckets."""

    spec: InputSpec
    buckets: tuple[Bucket, ...]
    teacher: int | None = None
    """Size of the teacher's vectors (0: it has none), or None if there is no teacher."""

    def plan(self, settings: Settings, world: World, device: str) -> Plan:
        """Return the plan of a training run. Training runs with equal plans use the same graphs."""
        share = rank_slice(settings.train, world.world_size, world.rank)
        return graph_plan(settings, self.spec, self.buckets, share, device, self.teacher)

    def scoring_plan(self, settings: Settings, world_size: int, device: str) -> Plan:
        """Return the plan for jobs that only evaluate or embed."""
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
        """Build a trial run, which uses every graph that a cycle needs so that all of them are compiled."""
        return Trial(settings, self.spec, self.buckets, backend, process_group, stop, console, watch, self.teacher)


def shapes_of(settings: Settings, ctx: StageContext, warn: Callable[[str], object]) -> Shapes:
    """Return the shapes of the prepared data or, if no data has been prepared yet, the shapes to expect.

    In the latter case, `warn` is called with the assumptions that we make. If these turn out to be wrong, the graph
    guard stops the training run. Raises DataError if the prepared data cannot be read.
    """
    prepared, ref = find_prepared(ctx), find_teacher(settings, ctx)
    teacher = None if ref is None else ref.width
    if prepared is None:
        given = given_buckets(settings.data, ctx.workspace, parent_buckets(settings, ctx.workspace))
        shapes = expected_shapes(settings, given or pinned_buckets(settings.data, ctx.workspace))
        shapes = replace(shapes, spec=_as_parent(shapes.spec, ctx))
        warn(
            f"no data has been prepared yet, assuming a vocabulary of {shapes.spec.vocab_size:,} tokens, "
            f"{shapes.spec.num_classes} labels, and texts of up to {shapes.buckets[-1].product_tokens} tokens"
        )
        return replace(shapes, teacher=teacher)
    info = read_token_sets(ctx.workspace, prepared.token_sets)[0].info
    return Shapes(_as_parent(spec_of(info), ctx), tuple(Bucket.parse(text) for text in info.buckets), teacher)


def _as_parent(spec: InputSpec, ctx: StageContext) -> InputSpec:
    """Return the inputs of a training run, for which a parent determines the form of numbers."""
    parent = parent_inputs(ctx.settings, ctx.workspace) if spec.may_miss else None
    return spec if parent is None else spec.with_numbers_of(parent)


def expected_shapes(settings: Settings, buckets: tuple[str, ...] = ()) -> Shapes:
    """Return the shapes to expect from the settings and the buckets of the dataset, if these are known.

    We assume that the vocabulary has its maximum size and, if `data.labels` is not set, that there are four labels. If
    no buckets are given or configured, we assume the longest texts for which buckets are chosen.
    """
    data = settings.data
    labels = data.labels or tuple(f"class {i}" for i in range(ASSUMED_CLASSES))
    spec = InputSpec(
        vocab_size=data.tokenizer.vocab_size,
        pad_id=0,
        labels=labels,
        label_gains=tuple(i / (len(labels) - 1) for i in range(len(labels))),
        numeric=(numeric := numeric_names(data)),
        attributes=data.attributes,
        categorical_ids=tuple(feature.num_ids for feature in data.categorical),
        query_prefix=data.query_prefix,
        product_prefix=data.product_prefix,
    ).with_numbers(tuple(name for name in numeric if not name.startswith(LEXICAL)))
    longest = min(LONGEST, settings.model.max_positions)
    return Shapes(spec, tuple(map(Bucket.parse, buckets or data.buckets)) or (Bucket(longest, longest),))
