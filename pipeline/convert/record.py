"""trnpipe.json: what an exported folder says of itself, so that it can be imported again as it was."""

from typing import Literal

from pydantic import Field

from pipeline.checkpoint.state import Parent
from pipeline.core.record import Record
from pipeline.model.config import InputSpec, ModelConfig

KIND = "export"
FILE = "trnpipe.json"
SCHEMA_VERSION = 1
Format = Literal["sentence-transformers", "transformers", "safetensors", "torch", "torchscript", "torch-export"]


class TensorSpec(Record):
    """An input or output of a program. Shapes are static."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ProgramFile(Record):
    """One compiled program."""

    file: str
    text: str = Field(description="What it computes")
    inputs: tuple[TensorSpec, ...]
    output: TensorSpec


class ExportRecord(Record):
    """The checkpoint behind an exported folder, and the files that hold it."""

    schema_version: int = SCHEMA_VERSION
    format: Format
    checkpoint: Parent = Field(description="What was exported; the parent of what is imported from here")
    model: ModelConfig
    inputs: InputSpec
    max_tokens: int = Field(ge=3, description="Texts are cut to this, [CLS] and [SEP] included")
    tokenizer_fingerprint: str
    watermark: str
    partitions: dict[str, str]
    settings_hash: str
    code_version: str
    weights: tuple[str, ...] = Field(description="Files that together hold every tensor; none: programs only")
    programs: tuple[ProgramFile, ...] = ()
