"""The plan of a cycle's embedding: what is embedded with which model, decided by the first worker and then fixed.

It is pinned with one conditional write, so that all workers and later attempts do the same work, whatever is promoted
or delivered meanwhile. The work shards follow from it alone.
"""

from functools import cached_property

from pydantic import Field, JsonValue

from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.embed.catalogue import Catalogue, WorkShard
from pipeline.embed.output import VectorLayout
from pipeline.io.storage import Storage, read_record


class ModelRef(Record):
    """The checkpoint that embeds."""

    name: str = Field(description="Of the model in the registry")
    place: str = Field(description="Prefix in the workspace, or the URI of a checkpoint elsewhere")
    digest: str = Field(description="Digest of its manifest: names its content")


class EarlierCycle(Record):
    """Vectors that were finished when this cycle was planned."""

    cycle: str
    digest: str = Field(description="Digest of their manifest")


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


def vectors_prefix(cycle: str) -> str:
    """Where the parts of a cycle lie in the workspace."""
    return f"embeddings/{cycle}"


def pinned_plan(workspace: Storage, cycle: str) -> EmbedPlan | None:
    """The plan of a cycle, None before there is one. Raises DataError when it cannot be read."""
    key = plan_key(cycle)
    return read_record(
        workspace,
        key,
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
