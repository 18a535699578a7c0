"""Settings of ahead-of-time compilation."""

import hashlib
import json
import re
from typing import Literal

from pydantic import Field

from pipeline.core.record import Record
from pipeline.io.paths import user_path

ALL_THERE_S = 1800.0
"""From the first node of a job to the last one: an image to load, a cache to pull; a dead node never arrives."""


# NEURON_CC_FLAGS in one spelling and one order: the Neuron cache key hashes the literal tokens. Facts: AWS Neuron SDK
# 2.29, neuronx-cc command line reference; the hash rule was checked against hashes seen in logs.

_TARGET_IS_HASHED = (2, 16)
_JSON_IS_HASHED = (2, 15)


class CompilerFlags(Record):
    """What neuronx-cc is told. The target is left to the framework, which adds it from the instance type."""

    model_type: Literal["generic", "transformer"] = Field("transformer", description="Kind of model to optimise for")
    auto_cast: Literal["none", "matmult", "all"] = Field(
        "none", description="What the compiler casts down; always stated, because its default changed in SDK 2.27"
    )
    auto_cast_type: Literal["bf16", "fp16", "tf32", "fp8_e4m3"] = Field(
        "bf16", description="Type that is cast to; used unless auto_cast is none"
    )
    optlevel: int = Field(1, ge=1, le=3, description="1 compiles fastest and with the least host memory")

    def tokens(self) -> tuple[str, ...]:
        """The flags, each `--name=value`."""
        cast_type = () if self.auto_cast == "none" else (f"--auto-cast-type={self.auto_cast_type}",)
        return (
            f"--model-type={self.model_type}",
            f"--auto-cast={self.auto_cast}",
            *cast_type,
            f"--optlevel={self.optlevel}",
        )

    def text(self) -> str:
        """The value of NEURON_CC_FLAGS."""
        return " ".join(self.tokens())


def flags_hash(tokens: tuple[str, ...], *, compiler: str, target: str) -> str:
    """The eight hex digits after `+` in a cache entry's name, as neuronx-cc `compiler` (a version) makes them.

    `tokens`: those of NEURON_CC_FLAGS without wrapper options; `target`: trn1, trn2, ..., as the framework adds it.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", compiler)[:2])
    if version >= _TARGET_IS_HASHED:
        text = json.dumps([f"--target={target}", *tokens])
    elif version >= _JSON_IS_HASHED:
        text = json.dumps(list(tokens))
    else:
        text = " ".join(tokens)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:8]


class CompileConfig(Record):
    """How the graphs of a cycle are compiled before it, and what happens when one was missed."""

    flags: CompilerFlags = CompilerFlags()
    tool: Literal["auto", "neuron", "none"] = Field(
        "auto",
        description="neuron: neuron_parallel_compile compiles what a trial run shows; none: graphs are compiled as the"
        " trial run meets them; auto: neuron on Neuron devices",
    )
    target: Literal["trn1", "trn2"] = Field("trn1", description="Chip that is compiled for; part of the cache key")
    scoring_ranks: tuple[int, ...] = Field(
        (),
        description="Numbers of ranks, on one machine, with which evaluation or embedding run on devices and training"
        " does not; their graphs are compiled for each, too",
    )
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
    sync_url: str = Field(
        "", description="s3://bucket/prefix that machines exchange compiled graphs through; empty: no exchange"
    )
    keep_versions: tuple[str, ...] = Field(
        (), description="Compiler versions, such as 2.24.8799.0, that cache repair keeps and sync moves; empty: all"
    )
    on_unknown_graph: Literal["error", "warn"] = Field(
        "error", description="What to do when a run needs a graph that was not compiled ahead of time"
    )

    def stage_limit_s(self, *, num_nodes: int) -> float:
        """For the stage where Neuron's tool compiles: the wait for the other nodes, and what the tool is given."""
        return self.time_limit_s + (ALL_THERE_S if num_nodes > 1 else 0.0)

    def cache_root(self, workspace: str) -> str:
        """Where compiled graphs lie: the absolute path of a folder, or s3://bucket/prefix."""
        root = self.cache_url or f"{workspace.rstrip('/')}/compile-cache"
        return root.rstrip("/") if root.startswith("s3://") else str(user_path(root.removeprefix("file://")))


class EstimateConfig(Record):
    """The machine that `trnpipe doctor` estimates for, and its price for costs."""

    instance: str = Field("trn1.32xlarge", description="Instance type whose cores are looked at")
    price_usd_per_hour: float | None = Field(
        None, ge=0, description="Dollars an hour for the machine (default: its on-demand list price, where known)"
    )
    mfu: float = Field(0.3, gt=0, le=1, description="Share of the peak FLOPS that a step is assumed to reach")
