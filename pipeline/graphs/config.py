"""Settings of ahead-of-time compilation."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeline.core.neuron_flags import CompilerFlags


class CompileConfig(BaseModel):
    """How the graphs of a cycle are compiled before it, and what happens when one was missed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flags: CompilerFlags = CompilerFlags()
    target: Literal["trn1", "trn2"] = Field("trn1", description="Chip that is compiled for; part of the cache key")
    parallel: int = Field(
        0, ge=0, le=256, description="Compilers at once on each machine; 0: one for every 64 GiB of its memory"
    )
    max_retries: int = Field(
        1, ge=0, le=10, description="Further tries of a graph that failed, and of a run that crashed"
    )
    time_limit_s: float = Field(
        14_400.0, gt=0, description="Seconds for tracing and compiling together, retries included"
    )
    cache_url: str = Field(
        "", description="Folder or s3://bucket/prefix of compiled graphs; empty: compile-cache/ below the workspace"
    )
    on_unknown_graph: Literal["error", "warn"] = Field(
        "error", description="What to do when a run needs a graph that was not compiled ahead of time"
    )
