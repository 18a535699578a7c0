"""The registry of one model: the production checkpoint, the deployed pair, and operations that change them.

The deployed pair is a model and the catalogue vectors made with it:

registry/<model>/serving.json    the pair that search uses, replaced by one conditional write after verify
registry/<model>/pairs/<n>.json  every version of serving.json by its generation, never changed

production.json is replaced when a model has passed the gate, hours before its vectors exist. A search that followed it
would mix two vector spaces, so serving.json names a checkpoint and the vectors made with it in one object.
"""

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, model_validator

from pipeline.core.errors import CheckpointError, ConfigError, DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.format import natural_key
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.checkpoints import Ancestor, lineage, prefix_in, read_checkpoint
from pipeline.registry.promote import promote, restore_production, rollback_target, verify_target
from pipeline.registry.records import (
    FOLDER,
    Author,
    Digest,
    HistoryEntry,
    ModelRecord,
    Pointer,
    append,
    check_model,
    current_user,
    list_models,
    one_line,
    read_current,
    read_history,
    read_pointer,
    stored_decision,
)
from pipeline.settings import Settings
from pipeline.telemetry.events import code_version


class Vectors(Record):
    """The committed vectors of one cycle."""

    cycle: str
    digest: Digest = Field(description="Digest of their manifest, every byte verified")
    generation: int = Field(description="Increases with every newer set of vectors")
    rows: int
    dim: int

    @property
    def prefix(self) -> str:
        return f"embeddings/{self.cycle}"

    def is_newer_than(self, other: "Vectors") -> bool:
        """Compare generations. Cycles planned at the same time have the same generation and are compared by name."""
        return (self.generation, natural_key(self.cycle)) > (other.generation, natural_key(other.cycle))


class DeployedPair(ModelRecord):
    """The content of serving.json: a checkpoint and vectors made with it."""

    schema_version: Literal[1] = 1
    id: str = Field("", description="Hash of all other fields (empty in files of earlier versions)")
    checkpoint: str = Field(description="Prefix in the workspace, or the URI of a checkpoint elsewhere")
    digest: Digest = Field(description="Digest of its manifest")
    vectors: Vectors
    generation: int = Field(0, ge=0, description="Number of changes of this file, including this one")
    action: Literal["verified", "promoted", "rolled_back"] = Field(
        "verified", description="promoted is only written by earlier versions"
    )
    reason: str = ""
    replaced: Digest | None = Field(None, description="Digest of the vectors that were served before")
    production_follows: int | None = Field(
        None, description="Generation of production that this rollback replaces next by the checkpoint of this pair"
    )
    author: Author

    @model_validator(mode="after")
    def _check_id(self) -> Self:
        if self.id and self.id != self.fingerprint:
            raise ValueError("its id does not match its content")
        return self

    @property
    def fingerprint(self) -> str:
        """Hash of all fields except `id`, without defaults, so that new fields do not change that of older files."""
        return fingerprint(self.model_dump(mode="json", exclude={"id"}, exclude_defaults=True))

    @property
    def digests(self) -> tuple[str, str]:
        """Digests of the checkpoint and of the vectors."""
        return self.digest, self.vectors.digest


def pair_key(model: str) -> str:
    """Return the key of serving.json. Raises ConfigError for an invalid name."""
    return f"{FOLDER}/{check_model(model)}/serving.json"


def read_pair(workspace: Storage, model: str) -> tuple[DeployedPair, str] | None:
    """Return the deployed pair and its etag, or None. Raises CheckpointError if serving.json is damaged."""
    return _read(workspace, pair_key(model), model)


def _read(workspace: Storage, key: str, model: str) -> tuple[DeployedPair, str] | None:
    repair = "restore an earlier version of the object (a copy of serving.json is the newest file in the folder pairs/)"
    return read_current(workspace, key, DeployedPair, model, "pair of a model and vectors", repair)


def past_pairs(workspace: Storage, model: str) -> tuple[DeployedPair, ...]:
    """Return every pair that was ever deployed, oldest first, including the current one."""
    stored = [_read(workspace, key, model) for key in (*_past_keys(workspace, model), pair_key(model))]
    by_generation = {item[0].generation: item[0] for item in stored if item is not None}
    return tuple(by_generation[generation] for generation in sorted(by_generation))


def _past_keys(workspace: Storage, model: str) -> list[str]:
    return [stat.key for stat in workspace.list(f"{FOLDER}/{check_model(model)}/pairs")]


def serve_verified_pair(workspace: Storage, pair: DeployedPair) -> str:
    """Deploy verified vectors if their model is in production. Return a status message.

    serving.json is not changed if it names newer vectors of the model, or was rolled back from these vectors. Raises
    TransientError if another process changes it concurrently, CheckpointError if the vectors have been deleted.
    """
    stored, pointer = read_pair(workspace, pair.model), read_pointer(workspace, pair.model)
    current = stored[0] if stored else None
    if current is not None and current.digests == pair.digests:
        return f"serving.json already names these vectors (generation {current.generation})"
    if pointer is None or pointer[0].digest != pair.digest:
        production = pointer[0].checkpoint if pointer else "nothing"
        return f"serving.json unchanged: {production} is in production, but the vectors are of {pair.checkpoint}"
    if current is not None and current.production_follows == pointer[0].generation:
        return "serving.json unchanged: a rollback is not finished, repeat its command"
    if current is not None and current.digest == pair.digest and current.vectors.is_newer_than(pair.vectors):
        return f"serving.json unchanged: it names newer vectors of this model (cycle {current.vectors.cycle})"
    if pair.vectors.digest in _rolled_back_vectors(past_pairs(workspace, pair.model)):
        command = f"trnpipe serving rollback {pair.vectors.cycle} --reason TEXT"
        return f"serving.json unchanged: it was rolled back from these vectors (to serve them anyway: {command})"
    _check_vectors(workspace, pair)
    written = _replace_pair(workspace, pair, stored)
    cycle, generation = written.vectors.cycle, written.generation
    return f"serving.json: {written.checkpoint} with the vectors of cycle {cycle} (generation {generation})"


def roll_back_model(
    workspace: Storage, model: str, to: str, *, reason: str, author: Author, without_vectors: bool = False
) -> Pointer:
    """Restore an earlier production checkpoint and deploy it with its vectors: both or neither.

    Restores the checkpoint at prefix `to`, or the previous one if `to` is empty. If no pair is deployed, or
    `without_vectors` is set, only production changes. serving.json is written first. After an interruption between both
    writes, the same command completes the rollback, and a rollback to the checkpoint still in production undoes it.
    Raises ConfigError if no vectors of that checkpoint were ever deployed, CheckpointError if it is damaged.
    """
    reason = _check_reason(reason, "trnpipe registry rollback --reason TEXT")
    served, stored = read_pair(workspace, model), read_pointer(workspace, model)
    if stored is None:
        raise ConfigError(f"no checkpoint of {model} is in production", expected="a checkpoint to roll back from")
    current = stored[0]
    past = append(workspace, model, current)  # its writer may have died before this
    target = rollback_target(current, past, to)
    if served is None or without_vectors:
        return restore_production(workspace, stored, past, target, reason, author)
    if target is None and served[0].production_follows != current.generation:
        return current
    restored, pairs = target or current.production, past_pairs(workspace, model)
    usable = [pair for pair in pairs if pair.digest == restored.digest and _has_vectors(workspace, pair)]
    if not usable:
        raise ConfigError(
            f"no vectors made with {restored.checkpoint} were deployed, or they no longer exist",
            expected="a pair in the history of serving.json, because model and vectors are rolled back together",
            next_command="trnpipe registry rollback --without-vectors --reason TEXT, then embed in a new cycle",
        )
    rolled_back = _rolled_back_vectors(pairs)
    pair = max(usable, key=lambda pair: (pair.vectors.digest not in rolled_back, pair.generation))
    follows = None
    if target is not None:
        verify_target(workspace, target)
        follows = current.generation
    # Write the pair even if it is already deployed, so that a concurrent verify that read production before this
    # rollback fails.
    if target is None or served[0].digests != pair.digests or served[0].production_follows != follows:
        changes = {"reason": reason, "author": author, "production_follows": follows}
        _replace_pair(workspace, pair, served, action="rolled_back", **changes)
    return restore_production(workspace, stored, past, target, reason, author)


def roll_back_vectors(workspace: Storage, model: str, cycle: str, *, reason: str, author: Author) -> DeployedPair:
    """Deploy earlier vectors of the deployed model: those of `cycle`, or the newest earlier ones if it is empty.

    Production does not change. Raises ConfigError if no such vectors were deployed, CheckpointError if they have been
    deleted, TransientError if another process changes serving.json concurrently.
    """
    reason = _check_reason(reason, "trnpipe serving rollback [CYCLE] --reason TEXT")
    served = read_pair(workspace, model)
    if served is None:
        raise ConfigError(f"no pair of {model} is deployed", expected="vectors to roll back from")
    current, pairs = served[0], past_pairs(workspace, model)
    if cycle == current.vectors.cycle and _has_vectors(workspace, current):
        return current
    rolled_back = _rolled_back_vectors(pairs)
    candidates = [
        pair
        for pair in pairs
        if pair.digest == current.digest
        and pair.digests != current.digests
        and (pair.vectors.cycle == cycle if cycle else current.vectors.is_newer_than(pair.vectors))
        and (cycle or pair.vectors.digest not in rolled_back)
    ]
    if not candidates:
        cycle_text = f"cycle {cycle}" if cycle else "an earlier cycle"
        raise ConfigError(
            f"no vectors of {cycle_text} made with {current.checkpoint} were deployed",
            expected=f"one of {', '.join(sorted({p.vectors.cycle for p in pairs if p.digest == current.digest}))}",
            next_command="trnpipe registry rollback --reason TEXT, which also rolls back the model",
        )
    # If a cycle was embedded several times, choose the vectors that still exist.
    pair = max(candidates, key=lambda pair: (_has_vectors(workspace, pair), pair.generation))
    _check_vectors(workspace, pair)
    follows = {"production_follows": current.production_follows}
    return _replace_pair(workspace, pair, served, action="rolled_back", reason=reason, author=author, **follows)


def _check_reason(reason: str, command: str) -> str:
    """Return the reason on one line. Raises ConfigError if it is empty."""
    if not one_line(reason):
        raise ConfigError("no reason is given", expected="a short reason", next_command=command)
    return one_line(reason)


def _replace_pair(
    workspace: Storage, pair: DeployedPair, stored: tuple[DeployedPair, str] | None, **changes: object
) -> DeployedPair:
    """Replace the `stored` pair (and etag) by `pair` with `changes` in its fields, and add it to the history.

    Raises TransientError if another process has changed serving.json.
    """
    current, etag = stored or (None, "")
    # Take the history into account in case serving.json was lost or restored, so that no generation is used twice.
    last = [_read(workspace, key, pair.model) for key in _past_keys(workspace, pair.model)[-1:]]
    existing = [item[0] for item in (stored, *last) if item is not None]
    fields = {
        "generation": max((item.generation for item in existing), default=0) + 1,
        "replaced": existing[0].vectors.digest if existing else None,
        "production_follows": None,
    }
    unnamed = pair.model_copy(update=fields | changes)
    written = unnamed.model_copy(update={"id": unnamed.fingerprint})
    if current is not None:
        _add_to_history(workspace, current)  # its writer may have died before adding it
    key, data = pair_key(pair.model), _to_json(written)
    if not (workspace.write_if_match(key, data, etag) if current else workspace.write_if_absent(key, data)):
        raise TransientError(
            f"another process has changed {workspace.uri(key)}",
            expected="the pair that this decision was made against",
            next_command="run the same command again",
        )
    _add_to_history(workspace, written)
    return written


def _add_to_history(workspace: Storage, pair: DeployedPair) -> None:
    workspace.write_if_absent(f"{FOLDER}/{pair.model}/pairs/{pair.generation:08d}.json", _to_json(pair))


def _to_json(pair: DeployedPair) -> bytes:
    return pair.model_dump_json(indent=1).encode() + b"\n"


def _rolled_back_vectors(pairs: Iterable[DeployedPair]) -> frozenset[str]:
    """Return the digests of vectors that were rolled back from and not deployed again since."""
    rolled_back: set[str] = set()
    for pair in pairs:
        if pair.action == "rolled_back" and pair.replaced is not None:
            rolled_back.add(pair.replaced)
        rolled_back.discard(pair.vectors.digest)
    return frozenset(rolled_back)


def _has_vectors(workspace: Storage, pair: DeployedPair) -> bool:
    """Return whether the verified vectors exist, with every file in full size."""
    try:
        return verify_dir(workspace, pair.vectors.prefix, deep=False).digest == pair.vectors.digest
    except DataError:
        return False


def _check_vectors(workspace: Storage, pair: DeployedPair) -> None:
    if not _has_vectors(workspace, pair):
        raise CheckpointError(
            f"{workspace.uri(pair.vectors.prefix)} does not contain the verified vectors",
            expected=f"vectors with the digest {pair.vectors.digest}, every file in full size",
            next_command="trnpipe serving show, to choose another cycle",
        )


class Registry:
    """The registry of one model in a workspace. Every call reads the current state.

    `workspace`: folder, URI or open storage. `model`: name of the model (default: the only model in the workspace).
    Raises ConfigError if the workspace cannot be opened, or if no name is given and it has no model or several models.
    """

    def __init__(self, workspace: str | Storage, model: str = "", *, author: Author | None = None) -> None:
        self.workspace = open_storage(workspace, stop=StopSignal()) if isinstance(workspace, str) else workspace
        self.model = check_model(model) if model else self._only_model()
        self._author = author

    def production(self) -> Pointer | None:
        """Return the entry of the checkpoint in production, or None. Raises CheckpointError if it is damaged."""
        stored = read_pointer(self.workspace, self.model)
        return stored[0] if stored else None

    def history(self) -> tuple[HistoryEntry, ...]:
        """Return every promotion, refusal and rollback, oldest first."""
        return read_history(self.workspace, self.model)

    def lineage(self, checkpoint: str = "") -> tuple[Ancestor, ...]:
        """Return a checkpoint (default: in production), its parent, and so on. Raises as checkpoints.lineage()."""
        if checkpoint:
            return lineage(self.workspace, prefix_in(self.workspace, checkpoint))
        pointer = self.production()
        return lineage(self.workspace, pointer.checkpoint) if pointer else ()

    def serving(self) -> DeployedPair | None:
        """Return the deployed pair of model and vectors, or None if no pair has been verified."""
        stored = read_pair(self.workspace, self.model)
        return stored[0] if stored else None

    def pairs(self) -> tuple[DeployedPair, ...]:
        """Return every pair that was ever deployed, oldest first."""
        return past_pairs(self.workspace, self.model)

    def vectors_uri(self, pair: DeployedPair | None = None) -> str:
        """Return the URI of the vectors of a pair (default: the deployed pair), for `trnpipe.open_vectors`."""
        pair = pair or self.serving()
        if pair is None:
            raise ConfigError(
                f"no pair of {self.model} is deployed",
                expected="a verified pair of model and vectors",
                next_command="trnpipe embed, then trnpipe embed verify",
            )
        return self.workspace.uri(pair.vectors.prefix)

    def promote(self, checkpoint: str, *, cycle: str = "", force: str = "") -> Pointer:
        """Put a checkpoint into production that passed the gate, or that is forced with a reason.

        `cycle`: a cycle that evaluated it, other than the one that trained it. Raises GateRefused if no passing verdict
        exists and `force` is empty, and otherwise as promote().
        """
        prefix, production = prefix_in(self.workspace, checkpoint), self.production()
        candidate = read_checkpoint(self.workspace, prefix)
        cycles = [name for name in (cycle, candidate.state.cycle) if name]
        incumbent = production.ref if production else None
        verdict = stored_decision(self.workspace, self.model, candidate.ref, incumbent, cycles)
        decision = verdict.model_copy(update={"forced": one_line(force)})
        return promote(self.workspace, self.model, prefix, expected=production, decision=decision, author=self.author())

    def rollback(self, checkpoint: str = "", *, reason: str, without_vectors: bool = False) -> Pointer:
        """Restore an earlier checkpoint (default: the previous one) and its vectors. Raises as roll_back_model()."""
        to = prefix_in(self.workspace, checkpoint) if checkpoint else ""
        return roll_back_model(
            self.workspace, self.model, to, reason=reason, author=self.author(), without_vectors=without_vectors
        )

    def rollback_vectors(self, cycle: str = "", *, reason: str) -> DeployedPair:
        """Deploy earlier vectors of the deployed model: those of `cycle`, or the newest earlier ones."""
        return roll_back_vectors(self.workspace, self.model, cycle, reason=reason, author=self.author())

    def author(self) -> Author:
        """Return the author to record for a change."""
        return self._author or Author(by=current_user(), code_version=code_version())

    def _only_model(self) -> str:
        models = list_models(self.workspace)
        if len(models) != 1:
            raise ConfigError(
                f"{self.workspace.root} has {len(models)} models{': ' if models else ''}{', '.join(models)}",
                expected="the name of one of them" if models else "a workspace in which a model was promoted",
                next_command="trnpipe registry list",
            )
        return models[0]


def resolve_model_name(settings: Settings, workspace: Storage) -> str:
    """Return the configured model name, or the only model if the default does not exist. Raises ConfigError if none."""
    models = list_models(workspace)
    if settings.model_name in models or not models:
        return settings.model_name
    if len(models) == 1 and settings.model_name == Settings.model_fields["model_name"].default:
        return models[0]
    raise ConfigError(
        f"{workspace.root} has no model {settings.model_name}",
        expected=f"one of {', '.join(models)}",
        next_command=f"--model-name {models[0]}, or the --config of its cycles",
    )
