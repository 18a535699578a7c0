"""A checkpoint as the registry sees it: its content's name and its state, without torch."""

from dataclasses import dataclass
from io import BytesIO

from pydantic import ValidationError

from pipeline.checkpoint.state import KIND, SCHEMA_VERSION, STATE, TOKENIZER, WEIGHTS, TrainState
from pipeline.core.errors import CheckpointError, DataError
from pipeline.io.commit import check_record, read_manifest, record_of, verify_dir
from pipeline.io.storage import Storage, join_key
from pipeline.registry.records import Place, check_prefix


@dataclass(frozen=True)
class Known:
    """A committed checkpoint of this workspace."""

    prefix: str
    digest: str
    state: TrainState

    @property
    def place(self) -> Place:
        return Place(checkpoint=self.prefix, digest=self.digest)


def read_checkpoint(workspace: Storage, prefix: str) -> Known:
    """Its manifest and state; the other files are not looked at. Raises CheckpointError, ConfigError for the prefix."""
    return _known(workspace, prefix, every_byte=False)


def verify_checkpoint(workspace: Storage, prefix: str) -> Known:
    """Read every byte of every file where it lies. Raises CheckpointError naming what is wrong."""
    return _known(workspace, prefix, every_byte=True)


def check_present(workspace: Storage, prefix: str) -> None:
    """That all files are still there in full size, by one listing. Raises CheckpointError."""
    try:
        verify_dir(workspace, prefix, deep=False)
    except DataError as error:
        raise _bad(workspace.uri(prefix), error) from error


def _known(workspace: Storage, prefix: str, *, every_byte: bool) -> Known:
    uri = workspace.uri(check_prefix(prefix))
    try:
        manifest = read_manifest(workspace, prefix)
        if manifest is None or manifest.kind != KIND:
            raise CheckpointError(
                f"{uri} holds no committed checkpoint",
                expected="a folder with a MANIFEST.json of kind checkpoint",
                next_command="name a checkpoint of this workspace as checkpoints/<cycle>/step-<n>",
            )
        if missing := sorted({WEIGHTS, STATE, TOKENIZER} - manifest.files.keys()):
            raise DataError(f"its manifest has no {missing[0]}")
        if every_byte and verify_dir(workspace, prefix, deep=True) != manifest:
            raise DataError("it is being replaced")
        data = workspace.read_bytes(join_key(prefix, STATE))
        check_record(workspace.uri(join_key(prefix, STATE)), manifest.files[STATE], record_of(BytesIO(data)))
        state = TrainState.model_validate_json(data)
        if state.schema_version != SCHEMA_VERSION:
            raise DataError(f"{STATE} has schema {state.schema_version}")
    except (DataError, ValidationError) as error:
        raise _bad(uri, error) from error
    return Known(prefix, manifest.digest, state)


def _bad(uri: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{uri}: {str(error).splitlines()[0]}",
        expected=f"a whole checkpoint of schema {SCHEMA_VERSION}",
        next_command="name another checkpoint; trnpipe registry show lists those that were in production",
    )
