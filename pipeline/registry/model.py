"""The registry of one model: what is in production, what is served with which vectors, and changing either.

The deployed pair is a model, and the vectors of the catalogue that it made:

registry/<model>/serving.json    what search follows; moved by one conditional write, after verify
registry/<model>/pairs/<n>.json  every version of serving.json by its generation; none is ever changed

production.json moves when a model has passed the gate, hours before its vectors exist. A search that followed it would
mix two vector spaces. serving.json names a checkpoint and the vectors made with it in one object.
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
from pipeline.registry.promote import promote, put_back, rollback_target, verified_target
from pipeline.registry.records import (
    FOLDER,
    Author,
    Digest,
    HistoryEntry,
    OfModel,
    Pointer,
    append,
    check_model,
    list_models,
    one_line,
    read_current,
    read_history,
    read_pointer,
    stored_decision,
    who,
)
from pipeline.settings import Settings
from pipeline.telemetry.events import code_version


class Vectors(Record):
    """The committed vectors of one cycle."""

    cycle: str
    digest: Digest = Field(description="Digest of their manifest, every byte verified")
    generation: int = Field(description="Of the vectors: later ones have a higher number")
    rows: int
    dim: int

    @property
    def prefix(self) -> str:
        return f"embeddings/{self.cycle}"

    def is_newer_than(self, other: "Vectors") -> bool:
        """Compare generations. Cycles that were planned at the same time have the same: then by name."""
        ours, theirs = ((one.generation, natural_key(one.cycle)) for one in (self, other))
        return ours > theirs


class DeployedPair(OfModel):
    """All of serving.json: a checkpoint and vectors made with it."""

    schema_version: Literal[1] = 1
    id: str = Field("", description="Hash of everything else; empty in files of earlier versions")
    checkpoint: str = Field(description="Prefix in the workspace, or the URI of a checkpoint elsewhere")
    digest: Digest = Field(description="Digest of its manifest")
    vectors: Vectors
    generation: int = Field(0, ge=0, description="Changes of this file so far, this one included")
    action: Literal["verified", "promoted", "rolled_back"] = Field(
        "verified", description="promoted: a challenger of earlier versions"
    )
    reason: str = ""
    replaced: Digest | None = Field(None, description="Digest of the vectors that were served until then")
    production_follows: int | None = Field(
        None, description="Generation of production that this rollback replaces next, by a checkpoint of its own"
    )
    author: Author

    @model_validator(mode="after")
    def _check_id(self) -> Self:
        if self.id and self.id != self.fingerprint:
            raise ValueError("its id does not fit its content")
        return self

    @property
    def fingerprint(self) -> str:
        """Hash of everything but `id`, without defaults, so that a field added later changes no older one."""
        return fingerprint(self.model_dump(mode="json", exclude={"id"}, exclude_defaults=True))

    @property
    def is_of(self) -> tuple[str, str]:
        """Digests of the checkpoint and of the vectors."""
        return self.digest, self.vectors.digest


def pair_key(model: str) -> str:
    """Return the key of serving.json. Raises ConfigError for an invalid name."""
    return f"{FOLDER}/{check_model(model)}/serving.json"


def read_pair(workspace: Storage, model: str) -> tuple[DeployedPair, str] | None:
    """Return the pair and its etag; None before the first. Raises CheckpointError if it is damaged."""
    return _read(workspace, pair_key(model), model)


def _read(workspace: Storage, key: str, model: str) -> tuple[DeployedPair, str] | None:
    repair = "put back an earlier version of the object; serving.json is the newest file below pairs/ beside it"
    return read_current(workspace, key, DeployedPair, model, "pair of a model and vectors", repair)


def past_pairs(workspace: Storage, model: str) -> tuple[DeployedPair, ...]:
    """Return every pair that was served, oldest first, including the one that is served now."""
    past = [_read(workspace, key, model) for key in (*_past_keys(workspace, model), pair_key(model))]
    found = {one[0].generation: one[0] for one in past if one is not None}
    return tuple(found[generation] for generation in sorted(found))


def _past_keys(workspace: Storage, model: str) -> list[str]:
    return [stat.key for stat in workspace.list(f"{FOLDER}/{check_model(model)}/pairs")]


def serve_verified_pair(workspace: Storage, pair: DeployedPair) -> str:
    """Serve verified vectors if their model is in production. Return a status message.

    serving.json stays if it names newer vectors of the model, or was rolled back from these. Repeating the call
    changes nothing. Raises TransientError if another process changes it meanwhile, CheckpointError if the vectors are
    gone.
    """
    found, pointer = read_pair(workspace, pair.model), read_pointer(workspace, pair.model)
    now = found[0] if found else None
    if now is not None and now.is_of == pair.is_of:
        return f"serving.json names them already, generation {now.generation}"
    if pointer is None or pointer[0].digest != pair.digest:
        there = pointer[0].checkpoint if pointer else "nothing"
        return f"serving.json stays: {there} is in production, the vectors are of {pair.checkpoint}"
    if now is not None and now.production_follows == pointer[0].generation:
        return "serving.json stays: a rollback is not finished; repeat its command"
    if now is not None and now.digest == pair.digest and now.vectors.is_newer_than(pair.vectors):
        return f"serving.json stays: it names newer vectors of this model, cycle {now.vectors.cycle}"
    if pair.vectors.digest in _rolled_back_vectors(past_pairs(workspace, pair.model)):
        again = f"trnpipe serving rollback {pair.vectors.cycle} --reason TEXT serves them all the same"
        return f"serving.json stays: it was rolled back from these vectors; {again}"
    _check_vectors(workspace, pair)
    written = _put(workspace, pair, found)
    what = f"{written.checkpoint} with the vectors of cycle {written.vectors.cycle}"
    return f"serving.json: {what}, generation {written.generation}"


def roll_back_model(
    workspace: Storage, model: str, to: str, *, reason: str, author: Author, without_vectors: bool = False
) -> Pointer:
    """Put an earlier production checkpoint back, and serve it with its vectors: both or neither.

    The one at prefix `to`, or with '' the one before; repeating that goes further back. If nothing is served, or
    `without_vectors`, production moves alone. serving.json moves first: killed between the two, the same command ends
    what it began, and the name of the checkpoint that is still in production takes it back. Raises ConfigError if no
    vectors of that checkpoint were ever served, CheckpointError if it is damaged.
    """
    served, reason = read_pair(workspace, model), _required(reason, "trnpipe registry rollback --reason TEXT")
    found = read_pointer(workspace, model)
    if found is None:
        raise ConfigError(f"nothing is in production of {model}", expected="a promoted checkpoint to roll back from")
    current, past = found[0], append(workspace, model, found[0])  # its writer may have died before its entry
    target = rollback_target(current, past, to)
    if served is None or without_vectors:
        return put_back(workspace, found, past, target, reason, author)
    if target is None and served[0].production_follows != current.generation:
        return current
    wanted, pairs = target or current.production, past_pairs(workspace, model)
    usable = [pair for pair in pairs if pair.digest == wanted.digest and _has_vectors(workspace, pair)]
    if not usable:
        raise ConfigError(
            f"no vectors made with {wanted.checkpoint} are here that were served",
            expected="a pair in the history of serving.json: model and vectors move together, or not at all",
            next_command="trnpipe registry rollback --without-vectors --reason TEXT; then embed and verify in a new"
            " cycle",
        )
    gone = _rolled_back_vectors(pairs)
    pair = max(usable, key=lambda pair: (pair.vectors.digest not in gone, pair.generation))
    follows = None
    if target is not None:
        verified_target(workspace, target)
        follows = current.generation
    # Written even if the pair is served already: a verify that saw production before this rollback then loses.
    if target is None or served[0].is_of != pair.is_of or served[0].production_follows != follows:
        changes = {"reason": reason, "author": author, "production_follows": follows}
        _put(workspace, pair, served, action="rolled_back", **changes)
    return put_back(workspace, found, past, target, reason, author)


def roll_back_vectors(workspace: Storage, model: str, cycle: str, *, reason: str, author: Author) -> DeployedPair:
    """Serve earlier vectors of the served model: those of `cycle`, or with '' the newest before these.

    Production stays; vectors of another model come back with it (roll_back_model). Raises ConfigError if there are no
    such vectors, CheckpointError if they are gone, TransientError if another process changes serving.json.
    """
    served, reason = read_pair(workspace, model), _required(reason, "trnpipe serving rollback [CYCLE] --reason TEXT")
    if served is None:
        raise ConfigError(f"nothing is served of {model}", expected="vectors to roll back from")
    now, pairs = served[0], past_pairs(workspace, model)
    if cycle == now.vectors.cycle and _has_vectors(workspace, now):
        return now
    gone = _rolled_back_vectors(pairs)
    known = [pair for pair in pairs if pair.digest == now.digest and pair.is_of != now.is_of]
    known = [
        pair
        for pair in known
        if (pair.vectors.cycle == cycle if cycle else now.vectors.is_newer_than(pair.vectors))
        and (cycle or pair.vectors.digest not in gone)
    ]
    if not known:
        raise ConfigError(
            f"no vectors of {f'cycle {cycle}' if cycle else 'an earlier cycle'} made with {now.checkpoint} were served",
            expected=f"one of {', '.join(sorted({p.vectors.cycle for p in pairs if p.digest == now.digest}))}",
            next_command="trnpipe registry rollback --reason TEXT, which takes the model along",
        )
    # Of vectors that were made anew under the same name, those that are there.
    pair = max(known, key=lambda pair: (_has_vectors(workspace, pair), pair.generation))
    _check_vectors(workspace, pair)
    follows = {"production_follows": now.production_follows}
    return _put(workspace, pair, served, action="rolled_back", reason=reason, author=author, **follows)


def _required(reason: str, command: str) -> str:
    """Return the reason on one line. Raises ConfigError without one."""
    if not one_line(reason):
        raise ConfigError("no reason is given", expected="why, in a few words", next_command=command)
    return one_line(reason)


def _put(
    workspace: Storage, pair: DeployedPair, found: tuple[DeployedPair, str] | None, **changes: object
) -> DeployedPair:
    """Write the pair, with `changes` in its fields, in place of what was `found`, and into the history.

    Raises TransientError if another process has changed it meanwhile.
    """
    now, etag = found or (None, "")
    # If serving.json was lost or an earlier version put back the history counts, so that no number is used twice.
    last = [_read(workspace, key, pair.model) for key in _past_keys(workspace, pair.model)[-1:]]
    known = [one[0] for one in (found, *last) if one is not None]
    fields = {
        "generation": max((one.generation for one in known), default=0) + 1,
        "replaced": known[0].vectors.digest if known else None,
        "production_follows": None,
    }
    unnamed = pair.model_copy(update=fields | changes)
    written = unnamed.model_copy(update={"id": unnamed.fingerprint})
    if now is not None:
        _remember(workspace, now)  # its writer may have died before this
    key, data = pair_key(pair.model), _stored(written)
    if not (workspace.write_if_match(key, data, etag) if now else workspace.write_if_absent(key, data)):
        raise TransientError(
            f"another process has changed {workspace.uri(key)} meanwhile",
            expected="the pair that this decision was made against",
            next_command="run the same command again",
        )
    _remember(workspace, written)
    return written


def _remember(workspace: Storage, pair: DeployedPair) -> None:
    workspace.write_if_absent(f"{FOLDER}/{pair.model}/pairs/{pair.generation:08d}.json", _stored(pair))


def _stored(pair: DeployedPair) -> bytes:
    return pair.model_dump_json(indent=1).encode() + b"\n"


def _rolled_back_vectors(pairs: Iterable[DeployedPair]) -> frozenset[str]:
    """Return digests of vectors that were rolled back from and were not served again since."""
    gone: set[str] = set()
    for pair in pairs:
        if pair.action == "rolled_back" and pair.replaced is not None:
            gone.add(pair.replaced)
        gone.discard(pair.vectors.digest)
    return frozenset(gone)


def _has_vectors(workspace: Storage, pair: DeployedPair) -> bool:
    """Return whether the vectors that were verified are there, every file in full size."""
    try:
        return verify_dir(workspace, pair.vectors.prefix, deep=False).digest == pair.vectors.digest
    except DataError:
        return False


def _check_vectors(workspace: Storage, pair: DeployedPair) -> None:
    if not _has_vectors(workspace, pair):
        raise CheckpointError(
            f"{workspace.uri(pair.vectors.prefix)} does not hold the vectors that were verified",
            expected=f"those with the digest {pair.vectors.digest}, every file in full size",
            next_command="trnpipe serving show; choose another cycle",
        )


class Registry:
    """What a workspace knows of one model. Each call reads what is there now.

    Args:
        workspace: folder or URI, or an open storage.
        model: its name; empty: the only one there is.

    Raises ConfigError for a workspace that cannot be opened, and without a name where there are several models or none.
    """

    def __init__(self, workspace: str | Storage, model: str = "", *, author: Author | None = None) -> None:
        self.workspace = open_storage(workspace, stop=StopSignal()) if isinstance(workspace, str) else workspace
        self.model = check_model(model) if model else self._only()
        self._author = author

    def production(self) -> Pointer | None:
        """Return the checkpoint in production, and how it came there; None before the first. Raises CheckpointError."""
        found = read_pointer(self.workspace, self.model)
        return found[0] if found else None

    def history(self) -> tuple[HistoryEntry, ...]:
        """Return every promotion, refusal and rollback, oldest first."""
        return read_history(self.workspace, self.model)

    def lineage(self, checkpoint: str = "") -> tuple[Ancestor, ...]:
        """Return a checkpoint (default: in production), its parent, and so on. Raises CheckpointError, ConfigError."""
        if checkpoint:
            return lineage(self.workspace, prefix_in(self.workspace, checkpoint))
        pointer = self.production()
        return lineage(self.workspace, pointer.checkpoint) if pointer else ()

    def serving(self) -> DeployedPair | None:
        """Return the model and the vectors that are served together; None before the first pair was verified."""
        found = read_pair(self.workspace, self.model)
        return found[0] if found else None

    def pairs(self) -> tuple[DeployedPair, ...]:
        """Return every pair that was served, oldest first."""
        return past_pairs(self.workspace, self.model)

    def vectors_uri(self, pair: DeployedPair | None = None) -> str:
        """Return the URI of the vectors of a pair (default: the served one), for `trnpipe.open_vectors`."""
        pair = pair or self.serving()
        if pair is None:
            raise ConfigError(
                f"nothing is served of {self.model}",
                expected="a pair that was verified",
                next_command="trnpipe embed, then trnpipe embed verify",
            )
        return self.workspace.uri(pair.vectors.prefix)

    def promote(self, checkpoint: str, *, cycle: str = "", force: str = "") -> Pointer:
        """Put a checkpoint into production that the gate has passed, or with a reason to overrule it.

        `cycle`: one that has judged it, beside the one that trained it. Raises GateRefused, CheckpointError,
        TransientError.
        """
        prefix, before = prefix_in(self.workspace, checkpoint), self.production()
        candidate = read_checkpoint(self.workspace, prefix)
        cycles = [name for name in (cycle, candidate.state.cycle) if name]
        incumbent = before.place if before else None
        judged = stored_decision(self.workspace, self.model, candidate.place, incumbent, cycles)
        decision = judged.model_copy(update={"forced": one_line(force)})
        return promote(self.workspace, self.model, prefix, expected=before, decision=decision, author=self.author())

    def rollback(self, checkpoint: str = "", *, reason: str, without_vectors: bool = False) -> Pointer:
        """Put an earlier checkpoint back (default: the one before), and serve it with its vectors: both or neither.

        Raises ConfigError, CheckpointError, TransientError.
        """
        to = prefix_in(self.workspace, checkpoint) if checkpoint else ""
        return roll_back_model(
            self.workspace, self.model, to, reason=reason, author=self.author(), without_vectors=without_vectors
        )

    def rollback_vectors(self, cycle: str = "", *, reason: str) -> DeployedPair:
        """Serve earlier vectors of the served model: those of `cycle`, or the newest before. Production stays."""
        return roll_back_vectors(self.workspace, self.model, cycle, reason=reason, author=self.author())

    def author(self) -> Author:
        """Return who is recorded for a change."""
        return self._author or Author(by=who(), code_version=code_version())

    def _only(self) -> str:
        models = list_models(self.workspace)
        if len(models) != 1:
            raise ConfigError(
                f"{self.workspace.root} knows {len(models)} models" + (f": {', '.join(models)}" if models else ""),
                expected="the name of one of them" if models else "a workspace in which a model was promoted",
                next_command="trnpipe registry list",
            )
        return models[0]


def readable_model(settings: Settings, workspace: Storage) -> str:
    """Return the model that the settings name; if that is the default and does not exist, the only one that exists.

    Raises ConfigError where another one must be named.
    """
    known = list_models(workspace)
    if settings.model_name in known or not known:
        return settings.model_name
    if len(known) == 1 and settings.model_name == Settings.model_fields["model_name"].default:
        return known[0]
    raise ConfigError(
        f"{workspace.root} has no model {settings.model_name}",
        expected=f"one of {', '.join(known)}",
        next_command=f"--model-name {known[0]}, or the --config of its cycles",
    )
