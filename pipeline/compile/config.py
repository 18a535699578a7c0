"""Settings of ahead-of-time compilation."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeline.core.record import Record
from pipeline.io.paths import user_path

ALL_THERE_S = 1800.0
"""Time-out for the last node of a job after the first: nodes load an image and pull a cache before they arrive."""


class CompilerFlags(Record):
    """Flags of neuronx-cc without the target, in a fixed order because the Neuron cache key hashes their tokens."""

    retired: ClassVar[Mapping[str, Any]] = {"model_type": "transformer", "auto_cast_type": "bf16"}

    auto_cast: Literal["none", "matmult", "all"] = Field(
        "none", description="Operations that the compiler casts to bf16; always passed, as its default changed in 2.27"
    )
    optlevel: int = Field(1, ge=1, le=3, description="Optimization level; 1 compiles fastest, with least host memory")

    def tokens(self) -> tuple[str, ...]:
        """Return the flags as `--name=value`."""
        cast_type = () if self.auto_cast == "none" else ("--auto-cast-type=bf16",)
        cast = (f"--auto-cast={self.auto_cast}", *cast_type)
        return ("--model-type=transformer", *cast, f"--optlevel={self.optlevel}")

    def text(self) -> str:
        """Return the value of NEURON_CC_FLAGS."""
        return " ".join(self.tokens())


class CompileConfig(Record):
    """Settings of ahead-of-time compilation and of its cache."""

    retired: ClassVar[Mapping[str, Any]] = {"target": ..., "parallel": ..., "max_retries": ..., "keep_versions": ()}

    flags: CompilerFlags = CompilerFlags()
    tool: Literal["auto", "neuron", "none"] = Field(
        "auto",
        description="neuron: trace a trial run with neuron_parallel_compile; none: compile during the trial run; auto:"
        " neuron on Neuron devices",
    )
    scoring_ranks: tuple[int, ...] = Field(
        (),
        description="Further numbers of ranks on one machine to compile the graphs of evaluation and embedding for",
    )
    time_limit_s: float = Field(
        14_400.0, gt=0, description="Time limit in seconds for tracing and compiling, including the retry"
    )
    cache_url: str = Field(
        "", description="Folder or s3://bucket/prefix of compiled graphs; empty: compile-cache/ in the workspace"
    )
    sync_url: str = Field(
        "", description="s3://bucket/prefix through which machines exchange compiled graphs; empty: no exchange"
    )
    on_unknown_graph: Literal["error", "warn"] = Field(
        "error", description="Action if a run needs a graph that was not compiled ahead of time"
    )

    def stage_limit_s(self, *, num_nodes: int) -> float:
        """Return the maximum duration of the stage with Neuron's tool, including the wait for other nodes."""
        return self.time_limit_s + (ALL_THERE_S if num_nodes > 1 else 0.0)

    def cache_root(self, workspace: str) -> str:
        """Return the location of compiled graphs: the absolute path of a folder, or s3://bucket/prefix."""
        root = self.cache_url or f"{workspace.rstrip('/')}/compile-cache"
        return root.rstrip("/") if root.startswith("s3://") else str(user_path(root.removeprefix("file://")))


class EstimateConfig(Record):
    """The machine for the estimates of `trnpipe doctor` and its price."""

    instance: str = Field("trn1.32xlarge", description="Instance type to estimate for")
    price_usd_per_hour: float | None = Field(
        None, ge=0, description="Price of the machine in dollars per hour (default: on-demand list price, if known)"
    )
    mfu: float = Field(0.3, gt=0, le=1, description="Model FLOPS utilization: assumed fraction of peak FLOPS")
