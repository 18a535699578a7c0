"""Settings for ahead-of-time compilation."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeline.core.record import Record
from pipeline.io.paths import user_path

ALL_THERE_S = 1800.0
"""How long the first node waits for the last one, since each node has to load an image and pull the cache first."""


class CompilerFlags(Record):
    """Flags for neuronx-cc, except for the target. Their order is fixed, since it affects the Neuron cache key."""

    retired: ClassVar[Mapping[str, Any]] = {"model_type": "transformer", "auto_cast_type": "bf16"}

    auto_cast: Literal["none", "matmult", "all"] = Field(
        "none", description="Operations that the compiler automatically casts to bf16 (--auto-cast)"
    )
    optlevel: int = Field(
        1, ge=1, le=3, description="Compiler optimization level; 1 compiles the fastest and uses the least memory"
    )

    def tokens(self) -> tuple[str, ...]:
        """Return a list of flags in the form `--name=value`.

        `--auto-cast` is always included, since its default value changed in release 2.27.
        """
        cast_type = () if self.auto_cast == "none" else ("--auto-cast-type=bf16",)
        cast = (f"--auto-cast={self.auto_cast}", *cast_type)
        return ("--model-type=transformer", *cast, f"--optlevel={self.optlevel}")

    def text(self) -> str:
        """Return the value of NEURON_CC_FLAGS."""
        return " ".join(self.tokens())


class CompileConfig(Record):
    """Settings for ahead-of-time compilation and the compile cache."""

    retired: ClassVar[Mapping[str, Any]] = {"target": ..., "parallel": ..., "max_retries": ..., "keep_versions": []}

    flags: CompilerFlags = CompilerFlags()
    tool: Literal["auto", "neuron", "none"] = Field(
        "auto",
        description="How to compile the graphs of a trial run; neuron: in parallel with neuron_parallel_compile, none:"
        " one by one during the trial run, auto: neuron on Neuron devices",
    )
    scoring_ranks: tuple[int, ...] = Field(
        (),
        description="Additional per-node rank counts for which to compile the graphs of evaluation and embedding",
    )
    time_limit_s: float = Field(
        14_400.0, gt=0, description="Time limit for tracing and compiling in seconds, including the retry"
    )
    cache_url: str = Field(
        "", description="Folder or s3://bucket/prefix for compiled graphs (default: compile-cache/ in the workspace)"
    )
    sync_url: str = Field(
        "", description="s3://bucket/prefix that machines use to share compiled graphs; empty to disable sharing"
    )
    on_unknown_graph: Literal["error", "warn"] = Field(
        "error", description="What to do if a run requires a graph that was not compiled ahead of time"
    )

    def stage_limit_s(self, *, num_nodes: int) -> float:
        """Return the maximum duration of the stage when using Neuron's tool, including the wait for other nodes."""
        return self.time_limit_s + (ALL_THERE_S if num_nodes > 1 else 0.0)

    def cache_root(self, workspace: str) -> str:
        """Return the location of the compile cache, which is either an absolute path or s3://bucket/prefix."""
        root = self.cache_url or f"{workspace.rstrip('/')}/compile-cache"
        return root.rstrip("/") if root.startswith("s3://") else str(user_path(root.removeprefix("file://")))


class EstimateConfig(Record):
    """Settings for the memory and time estimates of `trnpipe doctor`."""

    retired: ClassVar[Mapping[str, Any]] = {"price_usd_per_hour": ...}

    instance: str = Field("trn1.32xlarge", description="Instance type to use for the estimates")
    mfu: float = Field(0.3, gt=0, le=1, description="Assumed model FLOPS utilization, as a fraction of peak FLOPS")
