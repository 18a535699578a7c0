"""Settings of ahead-of-time compilation."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeline.core.record import Record
from pipeline.io.paths import user_path

ALL_THERE_S = 1800.0
"""From the first node of a job to the last one: an image to load, a cache to pull; a dead node never arrives."""


class CompilerFlags(Record):
    """The options of neuronx-cc, in one spelling and one order: the Neuron cache key hashes the literal tokens.

    The target is left to the framework, which adds it from the instance type.
    """

    retired: ClassVar[Mapping[str, Any]] = {"model_type": "transformer", "auto_cast_type": "bf16"}

    auto_cast: Literal["none", "matmult", "all"] = Field(
        "none", description="What the compiler casts to bf16; always stated, because its default changed in SDK 2.27"
    )
    optlevel: int = Field(1, ge=1, le=3, description="1 compiles fastest and with the least host memory")

    def tokens(self) -> tuple[str, ...]:
        """Return the flags, each `--name=value`."""
        cast_type = () if self.auto_cast == "none" else ("--auto-cast-type=bf16",)
        cast = (f"--auto-cast={self.auto_cast}", *cast_type)
        return ("--model-type=transformer", *cast, f"--optlevel={self.optlevel}")

    def text(self) -> str:
        """Return the value of NEURON_CC_FLAGS."""
        return " ".join(self.tokens())


class CompileConfig(Record):
    """How the graphs of a cycle are compiled before it, and what happens when one was missed."""

    retired: ClassVar[Mapping[str, Any]] = {"target": ..., "parallel": ..., "max_retries": ..., "keep_versions": ()}

    flags: CompilerFlags = CompilerFlags()
    tool: Literal["auto", "neuron", "none"] = Field(
        "auto",
        description="neuron: neuron_parallel_compile compiles what a trial run shows; none: graphs are compiled as the"
        " trial run meets them; auto: neuron on Neuron devices",
    )
    scoring_ranks: tuple[int, ...] = Field(
        (),
        description="Numbers of ranks, on one machine, with which evaluation or embedding run on devices and training"
        " does not; their graphs are compiled for each, too",
    )
    time_limit_s: float = Field(
        14_400.0, gt=0, description="Seconds for tracing and compiling together, the retry included"
    )
    cache_url: str = Field(
        "", description="Folder or s3://bucket/prefix of compiled graphs; empty: compile-cache/ below the workspace"
    )
    sync_url: str = Field(
        "", description="s3://bucket/prefix that machines exchange compiled graphs through; empty: no exchange"
    )
    on_unknown_graph: Literal["error", "warn"] = Field(
        "error", description="What to do when a run needs a graph that was not compiled ahead of time"
    )

    def stage_limit_s(self, *, num_nodes: int) -> float:
        """Return the longest that the stage takes with Neuron's tool, the wait for the other nodes included."""
        return self.time_limit_s + (ALL_THERE_S if num_nodes > 1 else 0.0)

    def cache_root(self, workspace: str) -> str:
        """Return where compiled graphs are: the absolute path of a folder, or s3://bucket/prefix."""
        root = self.cache_url or f"{workspace.rstrip('/')}/compile-cache"
        return root.rstrip("/") if root.startswith("s3://") else str(user_path(root.removeprefix("file://")))


class EstimateConfig(Record):
    """The machine that `trnpipe doctor` estimates for, and its price for costs."""

    instance: str = Field("trn1.32xlarge", description="Instance type whose cores are looked at")
    price_usd_per_hour: float | None = Field(
        None, ge=0, description="Dollars an hour for the machine (default: its on-demand list price, where known)"
    )
    mfu: float = Field(0.3, gt=0, le=1, description="Share of the peak FLOPS that a step is assumed to reach")
