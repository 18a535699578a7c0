"""What a stage leaves behind: one result.json per cycle and stage."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.core.errors import DataError
from pipeline.io.errors import KeyNotFound
from pipeline.io.storage import Storage

Figure = str | int | float | bool | None
Status = Literal["done", "already_done"]


class StageResult(BaseModel):
    """The outcome of one stage. Failures are exceptions, so a stored result is always a success."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    stage: str = Field(description="Name of the stage")
    cycle: str = Field(description="The cycle it belongs to")
    status: Status = Field(description="done; already_done when an earlier run's result was found (never stored)")
    inputs: dict[str, str] = Field(description="Fingerprint (or committed prefix) of each input by name")
    outputs: dict[str, str] = Field(default={}, description="Key of each artefact by name, relative to the workspace")
    figures: dict[str, Figure] = Field(default={}, description="What was measured; the unit is in the name")
    settings_hash: str
    code_version: str
    started: datetime = Field(description="UTC")
    finished: datetime = Field(description="UTC")


def result_key(cycle: str, stage: str) -> str:
    return f"cycles/{cycle}/{stage}/result.json"


def load_result(workspace: Storage, cycle: str, stage: str) -> StageResult | None:
    """The stored result, None when the stage has not finished. Raises DataError when it cannot be read."""
    key = result_key(cycle, stage)
    try:
        return StageResult.model_validate_json(workspace.read_bytes(key))
    except KeyNotFound:
        return None
    except ValidationError as error:
        raise DataError(
            f"{workspace.uri(key)} is no stage result: {error.errors(include_url=False)[0]['msg']}",
            expected="a result.json written by trnpipe",
            next_command=f"delete it and run trnpipe {stage} again",
        ) from error


def store_result(workspace: Storage, result: StageResult) -> StageResult:
    """Publish a result (atomic). The last thing a stage does."""
    stored = result.model_copy(update={"status": "done"})
    workspace.write_bytes(result_key(result.cycle, result.stage), stored.model_dump_json(indent=2).encode() + b"\n")
    return result
