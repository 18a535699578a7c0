"""NEURON_CC_FLAGS from typed settings, in one spelling and one order: the Neuron cache key hashes the literal tokens.

Facts: AWS Neuron SDK 2.29, neuronx-cc command line reference; the hash rule was checked against hashes seen in logs.
"""

import hashlib
import json
import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_TARGET_IS_HASHED = (2, 16)
_JSON_IS_HASHED = (2, 15)


class CompilerFlags(BaseModel):
    """What neuronx-cc is told. The target is left to the framework, which adds it from the instance type."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
