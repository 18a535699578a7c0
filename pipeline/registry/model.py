"""Deploy pairs of a model and its catalogue vectors, roll them back, and query the registry of a model.

The deployed pair is stored in the following files:

registry/<model>/serving.json    the pair that search should use, which is replaced atomically once it is verified
registry/<model>/pairs/<n>.json  all versions of serving.json by their generation, which are never modified

Note that search must not use production.json. A model is put into production as soon as it has passed the gate, which
is hours before its catalogue vectors exist, so a search would mix two vector spaces in the meantime. For this reason,
serving.json contains both a checkpoint and the vectors that were computed with it.
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
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, open_parent, open_storage
from pipeline.registry.checkpoints import Ancestor, key_in, lineage, prefix_in, read_checkpoint
from pipeline.registry.promote import promote, restore_production, rollback_target, verify_target
from pipeline.registry.records import (
    FOLDER,
    Author,
    CheckpointRef,
    Digest,
    HistoryEntry,
    ModelRecord,
    Pointer,
    append,
    check_model,
    current_user,
    is_recorded,
    list_models,
    one_line,
    read_current,
    read_history,
    read_pointer,
    stored_decision,
)
from pipeline.registry.signing import NO_KEYS, ModelKeys
from pipeline.settings import Settings
from pipeline.telemetry.events import code_version


class Vectors(Record):
    """The committed catalogue vectors of a cycle."""

    cycle: str
    digest: Digest = Field(description="Digest of the manifest, whose files have been verified")
    generation: int = Field(description="Number that increases with every newer set of vectors")
    rows: int
    dim: int

    @property
    def prefix(self) -> str:
        return f"embeddings/{self.cycle}"

    def is_newer_than(self, other: "Vectors") -> bool:
        """Return whether these vectors are newer. Cycles planned at the same time are compared by their names."""
        return (self.generation, natural_key(self.cycle)) > (other.generation, natural_key(other.cycle))


class DeployedPair(ModelRecord):
    """The content of serving.json: a checkpoint and the vectors that were computed with it."""

    schema_version: Literal[1] = 1
    id: str = Field("", description="Hash of all other fields (empty in files from earlier versions)")
    checkpoint: str = Field(description="Prefix in the workspace, or the URI of a checkpoint elsewhere")
    digest: Digest = Field(description="Digest of the manifest of the checkpoint")
    vectors: Vectors
    generation: int = Field(0, ge=0, description="Number of changes to this file, including this one")
    action: Literal["verified", "promoted", "rolled_back"] = Field(
        "verified", description="promoted is only written by earlier versions"
    )
    reason: str = ""
    replaced: Digest | None = Field(None, description="Digest of the vectors that were previously served")
    production_follows: int | None = Field(
        None, description="For a rollback, the generation of production that will be replaced by this checkpoint next"
    )
    author: Author

    @model_validator(mode="after")
    def _check_id(self) -> Self:
        if self.id and self.id != self.fingerprint:
            raise ValueError("its id does not match its content")
        return self

    @property
    def fingerprint(self) -> str:
        """Hash of all fields except `id`. Defaults are excluded so that adding fields does not invalidate old files."""
        return fingerprint(self.model_dump(mode="json", exclude={"id"}, exclude_defaults=True))

    @property
    def digests(self) -> tuple[str, str]:
        """The digests of the checkpoint and of the vectors."""
        return self.digest, self.vectors.digest


def pair_key(model: str) -> str:
    """Return the key of serving.json. Raises ConfigError if the name of the model is invalid."""
    return f"{FOLDER}/{check_model(model)}/serving.json"


def read_pair(workspace: Storage, model: str) -> tuple[DeployedPair, str] | None:
    """Read the deployed pair and its etag. Returns None if no pair is deployed.

    Raises CheckpointError if serving.json is damaged.
    """
    return _read(workspace, pair_key(model), model)


def _read(workspace: Storage, key: str, model: str) -> tuple[DeployedPair, str] | None:
    repair = "restore an earlier version of the object (a copy of serving.json is the newest file in the folder pairs/)"
    return read_current(workspace, key, DeployedPair, model, "pair of a model and vectors", repair)


def past_pairs(workspace: Storage, model: str) -> tuple[DeployedPair, ...]:
    """Return all pairs that have ever been deployed, including the current one, from oldest to newest."""
    stored = [_read(workspace, key, model) for key in (*_past_keys(workspace, model), pair_key(model))]
    by_generation = {item[0].generation: item[0] for item in stored if item is not None}
    return tuple(by_generation[generation] for generation in sorted(by_generation))


def _past_keys(workspace: Storage, model: str) -> list[str]:
    return [stat.key for stat in workspace.list(f"{FOLDER}/{check_model(model)}/pairs")]


def serve_verified_pair(workspace: Storage, pair: DeployedPair, keys: ModelKeys = NO_KEYS) -> str:
    """Deploy verified vectors if their model is in production. Returns a status message.

    The deployed pair is not changed if it already has newer vectors of the same model, or if it was rolled back from
    these vectors. Raises TransientError if another process changes serving.json concurrently, and CheckpointError if
    the vectors have been deleted or the model has no valid signature.
    """
    stored, pointer = read_pair(workspace, pair.model), read_pointer(workspace, pair.model)
    current = stored[0] if stored else None
    if current is not None and current.digests == pair.digests:
        return f"serving.json already refers to these vectors (generation {current.generation})"
    if pointer is None or pointer[0].digest != pair.digest:
        production = pointer[0].checkpoint if pointer else "nothing"
        return f"serving.json unchanged: the vectors belong to {pair.checkpoint}, but {production} is in production"
    if current is not None and current.production_follows == pointer[0].generation:
        return "serving.json unchanged: a rollback was interrupted, run the same rollback command again to complete it"
    if current is not None and current.digest == pair.digest and current.vectors.is_newer_than(pair.vectors):
        return f"serving.json unchanged: it refers to newer vectors of this model (cycle {current.vectors.cycle})"
    if pair.vectors.digest in _rolled_back_vectors(past_pairs(workspace, pair.model)):
        command = f"trnpipe serving rollback {pair.vectors.cycle} --reason TEXT"
        return f"serving.json unchanged: it was rolled back from these vectors (to serve them anyway: {command})"
    _check_pair(workspace, pair, keys)
    written = _replace_pair(workspace, pair, stored)
    cycle, generation = written.vectors.cycle, written.generation
    return f"serving.json: {written.checkpoint} with the vectors of cycle {cycle} (generation {generation})"


def roll_back_model(
    workspace: Storage,
    model: str,
    to: str,
    *,
    reason: str,
    author: Author,
    without_vectors: bool = False,
    keys: ModelKeys = NO_KEYS,
) -> Pointer:
    """Put an earlier checkpoint back into production and deploy it together with its vectors.

    The checkpoint is that at the prefix `to`, or the previous production checkpoint if `to` is empty. If no pair is
    deployed or `without_vectors` is set, only the production checkpoint is changed.

    serving.json is written first. If the rollback is interrupted before production is changed as well, running the same
    command again completes it, whereas a rollback to the checkpoint that is still in production undoes it. If it is
    interrupted before the change is recorded in the history, running the same command again only records it.

    Raises ConfigError if no vectors of the checkpoint have ever been deployed, and CheckpointError if it is damaged or
    has no valid signature.
    """
    reason = _check_reason(reason, "trnpipe registry rollback --reason TEXT")
    served, stored = read_pair(workspace, model), read_pointer(workspace, model)
    if stored is None:
        raise ConfigError(
            f"no checkpoint of {model} is in production",
            expected="a checkpoint to roll back from",
            next_command="trnpipe registry list, or a different --model-name or --workspace",
        )
    current = stored[0]
    is_same = not to and current.action == "rolled_back" and current.reasons == (reason,)
    is_done = is_same and not is_recorded(workspace, current)  # an earlier attempt could not record it
    past = append(workspace, model, current)  # in case the process that wrote the pointer died before appending it
    if is_done:
        return current
    target = rollback_target(current, past, to)
    if served is None or without_vectors:
        return restore_production(workspace, stored, past, target, reason, author, keys)
    if target is None and served[0].production_follows != current.generation:
        return current
    restored, pairs = target or current.production, past_pairs(workspace, model)
    usable = [pair for pair in pairs if pair.digest == restored.digest and _has_vectors(workspace, pair)]
    if not usable:
        raise ConfigError(
            f"no vectors of {restored.checkpoint} were ever deployed, or they no longer exist",
            expected="a pair in the history of serving.json, because model and vectors are rolled back together",
            next_command="trnpipe registry rollback --without-vectors --reason TEXT, then embed in a new cycle",
        )
    rolled_back = _rolled_back_vectors(pairs)
    pair = max(usable, key=lambda pair: (pair.vectors.digest not in rolled_back, pair.generation))
    follows = None if target is None else current.generation
    if target is not None or keys.public:
        verify_target(workspace, restored, keys)
    # Write the pair even if it is already deployed. This ensures that a concurrent verify fails if it has read the
    # production checkpoint before this rollback.
    if target is None or served[0].digests != pair.digests or served[0].production_follows != follows:
        changes = {"reason": reason, "author": author, "production_follows": follows}
        _replace_pair(workspace, pair, served, action="rolled_back", **changes)
    return restore_production(workspace, stored, past, target, reason, author, keys)


def roll_back_vectors(
    workspace: Storage, model: str, cycle: str, *, reason: str, author: Author, keys: ModelKeys = NO_KEYS
) -> DeployedPair:
    """Deploy earlier vectors of the deployed model.

    These are the vectors of `cycle`, or the most recent earlier ones if `cycle` is empty. The production checkpoint is
    not changed. Raises ConfigError if no such vectors have been deployed, CheckpointError if they have been deleted or
    the model has no valid signature, and TransientError if another process changes serving.json concurrently.
    """
    reason = _check_reason(reason, "trnpipe serving rollback [CYCLE] --reason TEXT")
    served = read_pair(workspace, model)
    if served is None:
        raise ConfigError(
            f"no pair of {model} is deployed",
            expected="vectors to roll back from",
            next_command="trnpipe embed verify, or a different --model-name or --workspace",
        )
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
            f"no vectors of {current.checkpoint} from {cycle_text} were ever deployed",
            expected=f"one of {', '.join(sorted({p.vectors.cycle for p in pairs if p.digest == current.digest}))}",
            next_command="trnpipe registry rollback --reason TEXT, which also rolls back the model",
        )
    # If a cycle has been embedded several times, prefer vectors that still exist.
    pair = max(candidates, key=lambda pair: (_has_vectors(workspace, pair), pair.generation))
    _check_pair(workspace, pair, keys)
    follows = {"production_follows": current.production_follows}
    return _replace_pair(workspace, pair, served, action="rolled_back", reason=reason, author=author, **follows)


def _check_reason(reason: str, command: str) -> str:
    """Return the reason as a single line. Raises ConfigError if it is empty."""
    if not one_line(reason):
        raise ConfigError("no reason is given", expected="a short reason", next_command=command)
    return one_line(reason)


def _replace_pair(
    workspace: Storage, pair: DeployedPair, stored: tuple[DeployedPair, str] | None, **changes: object
) -> DeployedPair:
    """Write `pair`, with `changes` applied to its fields, to serving.json, and add it to the history.

    Raises TransientError if serving.json is no longer the `stored` pair because another process has changed it.
    """
    current, etag = stored or (None, "")
    # Also look at the history, to avoid reusing a generation in case serving.json was lost or restored.
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
        _add_to_history(workspace, current)  # in case the process that wrote it died before adding it
    key, data = pair_key(pair.model), written.to_json()
    if not (workspace.write_if_match(key, data, etag) if current else workspace.write_if_absent(key, data)):
        raise TransientError(
            f"another process has changed {workspace.uri(key)}",
            expected="the pair that this decision was made against",
            next_command="run the same command again",
        )
    _add_to_history(workspace, written)
    return written


def _add_to_history(workspace: Storage, pair: DeployedPair) -> None:
    workspace.write_if_absent(f"{FOLDER}/{pair.model}/pairs/{pair.generation:08d}.json", pair.to_json())


def _rolled_back_vectors(pairs: Iterable[DeployedPair]) -> frozenset[str]:
    """Return the digests of all vectors that were rolled back from and have not been deployed again since."""
    rolled_back: set[str] = set()
    for pair in pairs:
        if pair.action == "rolled_back" and pair.replaced is not None:
            rolled_back.add(pair.replaced)
        rolled_back.discard(pair.vectors.digest)
    return frozenset(rolled_back)


def _has_vectors(workspace: Storage, pair: DeployedPair) -> bool:
    """Return whether the verified vectors still exist and all files have the right size."""
    try:
        return verify_dir(workspace, pair.vectors.prefix, deep=False).digest == pair.vectors.digest
    except DataError:
        return False


def _check_pair(workspace: Storage, pair: DeployedPair, keys: ModelKeys) -> None:
    """Raise CheckpointError if the vectors are gone, or if there are keys and the model has no valid signature."""
    if not _has_vectors(workspace, pair):
        raise CheckpointError(
            f"{workspace.uri(pair.vectors.prefix)} does not contain the verified vectors",
            expected=f"vectors with the digest {pair.vectors.digest}, and no missing or truncated files",
            next_command="trnpipe serving show, to choose a different cycle",
        )
    if keys.public:
        storage, prefix = workspace, key_in(workspace, pair.checkpoint)
        if prefix is None:
            storage, prefix = open_parent(pair.checkpoint, retry=RetryPolicy(), stop=workspace.stop)
        verify_target(storage, CheckpointRef(checkpoint=prefix, digest=pair.digest), keys)


class Registry:
    """The registry of a model. Nothing is cached, so every call returns the current state.

    Args:
        workspace: The workspace, as a folder, URI or open storage.
        model: Name of the model. It can be omitted if the workspace has only one model.
        author: Author to record for changes (default: the current user).
        keys: Keys to sign and verify checkpoints with, from `pipeline.registry.signing.open_keys` (default: none).

    Raises ConfigError if the workspace cannot be opened, or if the model is not unique and no name is given.
    """

    def __init__(
        self, workspace: str | Storage, model: str = "", *, author: Author | None = None, keys: ModelKeys = NO_KEYS
    ) -> None:
        self.workspace = open_storage(workspace, stop=StopSignal()) if isinstance(workspace, str) else workspace
        self.model = check_model(model) if model else self._only_model()
        self._author, self._keys = author, keys

    def production(self) -> Pointer | None:
        """Return the history entry of the production checkpoint, or None if no checkpoint is in production.

        Raises CheckpointError if the entry is damaged.
        """
        stored = read_pointer(self.workspace, self.model)
        return stored[0] if stored else None

    def history(self) -> tuple[HistoryEntry, ...]:
        """Return all promotions, refusals and rollbacks, from oldest to newest."""
        return read_history(self.workspace, self.model)

    def lineage(self, checkpoint: str = "") -> tuple[Ancestor, ...]:
        """Return the lineage of a checkpoint (default: the production checkpoint).

        See `pipeline.registry.checkpoints.lineage` for details.
        """
        if checkpoint:
            return lineage(self.workspace, prefix_in(self.workspace, checkpoint))
        pointer = self.production()
        return lineage(self.workspace, pointer.checkpoint) if pointer else ()

    def serving(self) -> DeployedPair | None:
        """Return the deployed pair of model and vectors, or None if no pair has been verified yet."""
        stored = read_pair(self.workspace, self.model)
        return stored[0] if stored else None

    def pairs(self) -> tuple[DeployedPair, ...]:
        """Return all pairs that have ever been deployed, from oldest to newest."""
        return past_pairs(self.workspace, self.model)

    def vectors_uri(self, pair: DeployedPair | None = None) -> str:
        """Return the URI of the vectors in a pair (default: the deployed pair).

        The vectors can be opened with `trnpipe.open_vectors`.
        """
        pair = pair or self.serving()
        if pair is None:
            raise ConfigError(
                f"no pair of {self.model} is deployed",
                expected="a verified pair of model and vectors",
                next_command="trnpipe embed, then trnpipe embed verify",
            )
        return self.workspace.uri(pair.vectors.prefix)

    def promote(self, checkpoint: str, *, cycle: str = "", force: str = "") -> Pointer:
        """Put a checkpoint into production.

        Args:
            checkpoint: Prefix, path or URI of the checkpoint.
            cycle: The cycle that evaluated the checkpoint, if this is not the cycle that trained it.
            force: Reason to promote the checkpoint although it has not passed the gate.

        Raises GateRefused if the checkpoint has not passed the gate and `force` is empty. See `promote.promote` for
        other errors.
        """
        prefix, production = prefix_in(self.workspace, checkpoint), self.production()
        candidate = read_checkpoint(self.workspace, prefix)
        cycles = [name for name in (cycle, candidate.state.cycle) if name]
        incumbent = production.ref if production else None
        verdict = stored_decision(self.workspace, self.model, candidate.ref, incumbent, cycles)
        decision = verdict.model_copy(update={"forced": one_line(force)})
        return promote(
            self.workspace,
            self.model,
            prefix,
            expected=production,
            decision=decision,
            author=self.author(),
            keys=self._keys,
        )

    def rollback(self, checkpoint: str = "", *, reason: str, without_vectors: bool = False) -> Pointer:
        """Put an earlier checkpoint (default: the previous one) back into production, together with its vectors.

        See `roll_back_model` for details.
        """
        to = prefix_in(self.workspace, checkpoint) if checkpoint else ""
        return roll_back_model(
            self.workspace,
            self.model,
            to,
            reason=reason,
            author=self.author(),
            without_vectors=without_vectors,
            keys=self._keys,
        )

    def rollback_vectors(self, cycle: str = "", *, reason: str) -> DeployedPair:
        """Deploy earlier vectors of the deployed model (default: the most recent ones). See `roll_back_vectors`."""
        author, keys = self.author(), self._keys
        return roll_back_vectors(self.workspace, self.model, cycle, reason=reason, author=author, keys=keys)

    def author(self) -> Author:
        """Return the author that is recorded for changes."""
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
    """Return the configured model name, or the only existing model if no name is configured.

    Raises ConfigError if the configured model does not exist although there are other models.
    """
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
