"""The plan of a cycle's embedding: what is embedded with which model, decided by the first worker and then fixed.

It is pinned with one conditional write, so that all workers and later attempts do the same work, whatever is promoted
or delivered meanwhile. The work shards follow from it alone.
"""

from functools import cached_property

from pydantic import Field, JsonValue

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.context import StageContext
from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.data.config import DataConfig
from pipeline.embed.carry_over import EarlierCycle, find_earlier
from pipeline.embed.catalogue import Catalogue, WorkShard
from pipeline.embed.config import EmbedConfig
from pipeline.embed.gather import find_catalogue
from pipeline.embed.vectors import ModelRef, VectorLayout, check_dimensions, vectors_prefix
from pipeline.io.storage import Storage, open_storage, read_record
from pipeline.registry.checkpoints import incumbent_prefix, locate
from pipeline.settings import Settings


class EmbedPlan(Record):
    """Everything the parts depend on."""

    schema_version: int = 1
    cycle: str
    generation: int = Field(ge=1, description="One more than that of the newest finished vectors")
    asked: dict[str, JsonValue] = Field(description="The settings that decide the work, by name")
    catalogue: Catalogue
    model: ModelRef
    made_by: dict[str, JsonValue] = Field(description="All that decides a vector, the text aside, by name")
    layout: VectorLayout
    max_tokens: int
    rows_per_part: int
    window_rows: int
    quarantine_rows: int
    previous: EarlierCycle | None = Field(description="The newest finished vectors")
    carry_from: EarlierCycle | None = Field(
        description="The newest made as ours will be: unchanged rows are taken over"
    )

    @cached_property
    def fingerprint(self) -> str:
        """Names the plan; in every part, so that no part of another plan is taken for one of this."""
        return fingerprint(self.model_dump(mode="json"))

    @cached_property
    def shards(self) -> tuple[WorkShard, ...]:
        return self.catalogue.shards(self.rows_per_part)

    @property
    def metadata(self) -> dict[str, str]:
        """What every part says of itself."""
        made = {name: str(value) for name, value in self.made_by.items()}
        layout = {"dtype": self.layout.dtype, "dim": str(self.layout.dim)}
        model = {"model": self.model.name, "checkpoint": self.model.place}
        return made | layout | model | {"cycle": self.cycle, "plan": self.fingerprint}


def plan_key(cycle: str) -> str:
    return f"cycles/{cycle}/embed/plan.json"


def pinned_plan(workspace: Storage, cycle: str) -> EmbedPlan | None:
    """The plan of a cycle, None before there is one. Raises DataError when it cannot be read."""
    return read_record(
        workspace,
        plan_key(cycle),
        EmbedPlan,
        what="an embedding plan",
        writer="this version of trnpipe embed",
        next_command=_start_over(workspace, cycle),
    )


def pin_plan(workspace: Storage, plan: EmbedPlan) -> EmbedPlan:
    """Store the plan unless another worker was first; the result is the one that counts."""
    workspace.write_if_absent(plan_key(plan.cycle), plan.model_dump_json(indent=1).encode() + b"\n")
    pinned = pinned_plan(workspace, plan.cycle)
    return pinned if pinned is not None else plan


def check_asked(plan: EmbedPlan, asked: dict[str, JsonValue], workspace: Storage) -> None:
    """Raises ConfigError naming the first setting in which this run differs from the cycle's plan."""
    for name in sorted(plan.asked.keys() | asked.keys()):
        if plan.asked.get(name) != asked.get(name):
            raise ConfigError(
                f"{name} is {asked.get(name)!r}; cycle {plan.cycle} was begun with {plan.asked.get(name)!r}",
                expected="the settings with which the cycle was begun",
                next_command=f"the same settings, another --cycle, or {_start_over(workspace, plan.cycle)}",
            )


def _start_over(workspace: Storage, cycle: str) -> str:
    folders = (workspace.uri(f"cycles/{cycle}/embed"), workspace.uri(vectors_prefix(cycle)))
    return f"delete {folders[0]} and {folders[1]} to start over"


# Making the plan: find the catalogue, look at the checkpoint, choose the earlier vectors.

_DATA_FIELDS = {"path", "format", "esci_locale", "columns", "filter", "synthetic"}


def asked_for(config: EmbedConfig, data: DataConfig) -> dict[str, JsonValue]:
    """The settings that decide the work, by name; the data input counts where there is no catalogue."""
    asked: dict[str, JsonValue] = {"embed.checkpoint": config.checkpoint, "embed.precision": config.precision}
    if config.chunks > 1:
        asked["embed.chunks"] = config.chunks
    catalogue = config.catalogue.model_dump(mode="json", exclude={"max_bad_fraction"})
    asked |= {f"embed.catalogue.{name}": value for name, value in catalogue.items()}
    asked |= {f"embed.output.{name}": value for name, value in config.output.model_dump(mode="json").items()}
    if config.catalogue.path is None:
        asked |= {f"data.{name}": value for name, value in data.model_dump(mode="json", include=_DATA_FIELDS).items()}
    return asked


def make_plan(settings: Settings, ctx: StageContext) -> tuple[EmbedPlan, Checkpoint]:
    """What this cycle embeds, and the checkpoint it does it with. Raises TrnpipeError."""
    config, place = settings.embed, model_place(settings, ctx)
    checkpoint = open_model(place, settings, ctx)
    model = ModelRef(name=settings.model_name, place=place, digest=checkpoint.digest)
    width, max_tokens = checkpoint.state.model.encoder.hidden_size, longest_text(settings, checkpoint)
    check_dimensions("embed.output.dimensions", config.output.dimensions, width)
    catalogue = find_catalogue(config.catalogue, settings.data, ctx)
    layout = VectorLayout(
        format=config.output.format,
        dtype=config.output.dtype,
        dim=config.output.dimensions or width,
        id_type=catalogue.id_type,
    )
    made_by: dict[str, JsonValue] = {
        "checkpoint_digest": model.digest,
        "tokenizer": checkpoint.state.tokenizer_fingerprint,
        "pooling": checkpoint.state.model.pooling,
        "precision": config.precision,
        "max_tokens": max_tokens,
        "normalised": True,
    }
    if config.chunks > 1:  # vectors of before there were chunks stay what they are
        made_by["chunks"] = config.chunks
    earlier = find_earlier(ctx.workspace, ctx.cycle, config.output.carry_over, made_by, layout)
    plan = EmbedPlan(
        cycle=ctx.cycle,
        generation=earlier.generation + 1,
        asked=asked_for(config, settings.data),
        catalogue=catalogue,
        model=model,
        made_by=made_by,
        layout=layout,
        max_tokens=max_tokens,
        rows_per_part=config.output.rows_per_part,
        window_rows=config.catalogue.window_rows,
        quarantine_rows=config.catalogue.quarantine_rows,
        previous=earlier.previous,
        carry_from=earlier.carry_from,
    )
    return plan, checkpoint


def cycle_plan(settings: Settings, ctx: StageContext) -> tuple[EmbedPlan, Checkpoint | None]:
    """The plan of the cycle, made when there is none; and the checkpoint if it had to be opened for that."""
    plan = pinned_plan(ctx.workspace, ctx.cycle)
    if plan is not None:
        check_asked(plan, asked_for(settings.embed, settings.data), ctx.workspace)
        return plan, None
    made, checkpoint = make_plan(settings, ctx)
    plan = pin_plan(ctx.workspace, made)
    check_asked(plan, made.asked, ctx.workspace)
    return plan, checkpoint if plan.model == made.model else None


# The checkpoint that embeds: the promoted one, or the one named in the settings; pinned by the plan of the cycle.


def model_place(settings: Settings, ctx: StageContext) -> str:
    """Prefix in the workspace, or URI, of the checkpoint the settings ask for. Raises CheckpointError without one."""
    if settings.embed.checkpoint:
        return settings.embed.checkpoint.rstrip("/")
    promoted = incumbent_prefix(ctx.workspace, settings.model_name)
    if promoted is not None:
        return promoted
    trained = ctx.earlier("train")
    candidate = trained.outputs.get("checkpoint") if trained else None
    raise CheckpointError(
        f"no checkpoint of model {settings.model_name} is promoted in {ctx.workspace.root}",
        expected="a promoted checkpoint, or one that is named",
        next_command=f"trnpipe evaluate, or --embed.checkpoint {candidate or 'checkpoints/<cycle>/step-<n>'}",
    )


def open_model(place: str, settings: Settings, ctx: StageContext) -> Checkpoint:
    """The checkpoint, every byte verified. Raises CheckpointError."""
    storage, prefix = locate(place, settings, ctx.workspace)
    return open_checkpoint(storage, prefix, ctx.scratch / "embed" / "model")


def open_pinned(model: ModelRef, settings: Settings, ctx: StageContext) -> Checkpoint:
    """The checkpoint of the plan. Raises CheckpointError when it is gone or not the same any more."""
    checkpoint = open_model(model.place, settings, ctx)
    if checkpoint.digest != model.digest:
        raise CheckpointError(
            f"{checkpoint.uri} has digest {checkpoint.digest}",
            expected=f"{model.digest}, with which cycle {ctx.cycle} was begun",
            next_command="embed in a new cycle",
        )
    return checkpoint


def catalogue_storage(plan: EmbedPlan, settings: Settings, ctx: StageContext) -> Storage:
    """Where the files of the catalogue lie."""
    root = plan.catalogue.root
    return open_storage(root, retry=settings.storage, stop=ctx.stop) if root else ctx.workspace


def longest_text(settings: Settings, checkpoint: Checkpoint) -> int:
    """Tokens of a text that the model reads."""
    state = checkpoint.state
    return settings.embed.text_limit(state.max_tokens, state.model.max_positions)
