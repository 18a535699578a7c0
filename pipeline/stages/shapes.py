"""What decides the shapes of a cycle's graphs beside the training settings: vocabulary, classes, features, buckets."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.backends import Backend
from pipeline.compile.manifest import Plan
from pipeline.compile.plan import GraphSettings, evaluation_plan, graph_plan
from pipeline.compile.watch import GraphWatch
from pipeline.context import StageContext
from pipeline.core.buckets import Bucket
from pipeline.core.stop import StopSignal
from pipeline.data.lexical import numeric_names
from pipeline.data.tokens import read_token_sets
from pipeline.model.config import InputSpec
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import World
from pipeline.settings import Settings
from pipeline.stages.prepared import find_prepared
from pipeline.telemetry.console import Console
from pipeline.train.inputs import spec_of
from pipeline.train.share import batch_share
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
        return graph_plan(_graphs(settings), self.spec, self.buckets, batch_share(settings.train, world), device)

    def scoring_plan(self, settings: Settings, world_size: int, device: str) -> Plan:
        """The same for evaluation and embedding alone."""
        return evaluation_plan(_graphs(settings), self.spec, self.buckets, world_size, device)

    def trial(
        self, settings: Settings, backend: Backend, gang: Gang, watch: GraphWatch, stop: StopSignal, console: Console
    ) -> Trial:
        """The trial run of these settings, ready to run."""
        return Trial(
            train=settings.train,
            model=settings.model,
            embed=settings.embed,
            spec=self.spec,
            buckets=self.buckets,
            backend=backend,
            gang=gang,
            stop=stop,
            console=console,
            watch=watch,
            figure_rows=settings.log.every_steps,
        )


def _graphs(settings: Settings) -> GraphSettings:
    return GraphSettings(settings.train, settings.model, settings.embed, settings.compile, settings.log.every_steps)


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
    )
    return Shapes(spec, tuple(Bucket.parse(text) for text in data.buckets))
