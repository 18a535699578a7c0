"""The pair that is served: a model, and the vectors of the catalogue that it made.

registry/<model>/serving.json             what search follows; moved by one conditional write, after verify
registry/<model>/serving-challenger.json  another pair for shadow traffic or an A/B test, promoted by one write
registry/<model>/pairs/<n>.json           what serving.json was before, by its generation

production.json moves when a model has passed the gate, hours before its vectors exist. Whoever follows it mixes two
vector spaces; serving.json names a checkpoint and the vectors made with it in one object, so nobody who reads it can.
"""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, ValidationError

from pipeline.core.errors import CheckpointError, ConfigError, TransientError
from pipeline.core.record import Record
from pipeline.io.commit import read_manifest
from pipeline.io.storage import KeyNotFound, Storage
from pipeline.registry.checkpoints import key_in, read_checkpoint
from pipeline.registry.promote import roll_back, rollback_target
from pipeline.registry.records import (
    FOLDER,
    Author,
    Digest,
    ModelName,
    Pointer,
    Production,
    changes_of,
    check_model,
    one_line,
    read_history,
    read_pointer,
)

Role = Literal["serving", "serving-challenger"]
SERVING: Role = "serving"
CHALLENGER: Role = "serving-challenger"


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


class Pair(Record):
    """All of serving.json: a checkpoint and vectors made with it."""

    schema_version: Literal[1] = 1
    model: ModelName
    checkpoint: str = Field(description="Prefix in the workspace, or the URI of a checkpoint elsewhere")
    digest: Digest = Field(description="Digest of its manifest")
    vectors: Vectors
    generation: int = Field(0, ge=0, description="Changes of this file so far, this one included")
    action: Literal["verified", "promoted", "rolled_back"] = "verified"
    reason: str = ""
    replaced: Digest | None = Field(None, description="Digest of the vectors that were served until then")
    author: Author

    @property
    def is_of(self) -> tuple[str, str]:
        """What belongs together."""
        return self.digest, self.vectors.digest


def pair_key(model: str, role: Role = SERVING) -> str:
    """Raises ConfigError for a name that is none."""
    return f"{FOLDER}/{check_model(model)}/{role}.json"


def read_pair(workspace: Storage, model: str, role: Role = SERVING) -> tuple[Pair, str] | None:
    """The pair and its etag; None before the first. Raises CheckpointError for a damaged one."""
    key = pair_key(model, role)
    stat = workspace.stat(key)  # before the content: a conditional write with it never overwrites what was not read
    if stat is None:
        return None
    try:
        return _parsed(workspace, key), stat.etag
    except KeyNotFound:
        return None


def past_pairs(workspace: Storage, model: str) -> tuple[Pair, ...]:
    """Every pair that was served, oldest first, the one that is served now included."""
    keys = sorted(stat.key for stat in workspace.list(f"{FOLDER}/{check_model(model)}/pairs"))
    found = {pair.generation: pair for pair in (_parsed(workspace, key) for key in keys)}
    if now := read_pair(workspace, model):
        found[now[0].generation] = now[0]
    return tuple(found[generation] for generation in sorted(found))


def serve_verified_pair(workspace: Storage, pair: Pair, role: Role = SERVING) -> str:
    """Let verified vectors be served with the model that made them, if it is theirs to be; what became of it, in words.

    serving.json moves when the model is in production, and the vectors are newer than those that are served with it
    and were not rolled back from. A challenger needs neither. Twice is fine.
    Raises TransientError when another changes it meanwhile.
    """
    found = read_pair(workspace, pair.model, role)
    now = found[0] if found else None
    if now is not None and now.is_of == pair.is_of:
        return f"{role}.json names them already, generation {now.generation}"
    if role == SERVING:
        pointer = read_pointer(workspace, pair.model)
        if pointer is None or pointer[0].digest != pair.digest:
            there = pointer[0].checkpoint if pointer else "nothing"
            return f"serving.json stays: {there} is in production, the vectors are of {pair.checkpoint}"
        # Those of one cycle are equal: made anew, they are served.
        if (
            now is not None
            and now.digest == pair.digest
            and (now.vectors.generation, now.vectors.cycle) > (pair.vectors.generation, pair.vectors.cycle)
        ):
            return f"serving.json stays: it names newer vectors of this model, cycle {now.vectors.cycle}"
        if pair.vectors.digest in _rolled_back_vectors(past_pairs(workspace, pair.model)):
            again = f"trnpipe serving rollback {pair.vectors.cycle} --reason TEXT serves them all the same"
            return f"serving.json stays: it was rolled back from these vectors; {again}"
    written = _put(workspace, pair, found, role)
    what = f"{written.checkpoint} with the vectors of cycle {written.vectors.cycle}"
    return f"{role}.json: {what}, generation {written.generation}"


def promote_challenger(workspace: Storage, model: str, *, reason: str, author: Author) -> Pair:
    """Serve the challenger. Its model must be in production, or a reason given, which goes on record.

    Raises ConfigError without a challenger or for a model that the gate did not pass, CheckpointError when its vectors
    are gone, TransientError when another changes serving.json meanwhile.
    """
    challenger = read_pair(workspace, model, CHALLENGER)
    if challenger is None:
        raise ConfigError(
            f"{workspace.uri(pair_key(model, CHALLENGER))}: there is no challenger",
            expected="a pair beside the one that is served",
            next_command="trnpipe embed verify --embed.verify.serve challenger",
        )
    pair, found, pointer = challenger[0], read_pair(workspace, model), read_pointer(workspace, model)
    if found is not None and found[0].is_of == pair.is_of:
        return found[0]
    if (pointer is None or pointer[0].digest != pair.digest) and not one_line(reason):
        raise ConfigError(
            f"the challenger's model {pair.checkpoint} is not in production",
            expected="a model that the gate has promoted, or a reason to serve another",
            next_command=f"trnpipe registry promote {pair.checkpoint}; or, on record,"
            " trnpipe serving promote --reason TEXT",
        )
    _check_vectors(workspace, pair)
    return _put(workspace, pair, found, SERVING, action="promoted", reason=one_line(reason), author=author)


def roll_back_model(
    workspace: Storage, model: str, to: str, *, reason: str, author: Author, without_vectors: bool = False
) -> Pointer:
    """Put an earlier production checkpoint back (promote.roll_back), and serve it with its vectors: both or neither.

    Where nothing is served production moves alone, and so it does `without_vectors`: what is served stays a pair.
    serving.json moves first: killed between the two, the same command ends what it began.
    Raises ConfigError when no vectors of that checkpoint were ever served.
    """
    served = read_pair(workspace, model)
    *_, target = rollback_target(workspace, model, to, reason=reason)
    if target is None or served is None or without_vectors:
        return roll_back(workspace, model, to, reason=reason, author=author)
    pairs = past_pairs(workspace, model)
    usable = [pair for pair in pairs if pair.digest == target.digest and _has_vectors(workspace, pair)]
    gone = _rolled_back_vectors(pairs)
    usable = [pair for pair in usable if pair.vectors.digest not in gone] or usable
    if not usable:
        raise ConfigError(
            f"no vectors made with {target.checkpoint} are here that were served",
            expected="a pair in the history of serving.json: model and vectors move together, or not at all",
            next_command="trnpipe registry rollback --without-vectors --reason TEXT; then embed and verify in a new"
            " cycle",
        )
    return _roll_both(workspace, usable[-1], served, reason, author, target)


def roll_back_pair(workspace: Storage, model: str, cycle: str, *, reason: str, author: Author) -> Pair:
    """Serve an earlier pair: that of the vectors of `cycle`, or with '' the one before.

    Production follows where its model is another than the served one: of other vectors of the same model it is no
    matter.

    Raises ConfigError when there is none, CheckpointError when it is damaged, TransientError when another changes it.
    """
    served = read_pair(workspace, model)
    if not one_line(reason):
        raise ConfigError("no reason is given", expected="why", next_command="trnpipe serving rollback --reason TEXT")
    pairs = past_pairs(workspace, model)
    if served is None or not pairs:
        raise ConfigError(f"nothing is served of {model}", expected="a pair to roll back from")
    now, gone = served[0], _rolled_back_vectors(pairs)
    pointer = read_pointer(workspace, model)
    produced = pointer[0].digest if pointer else None
    left = {pair.digest for pair in pairs if now.action == "rolled_back" and pair.vectors.digest == now.replaced}
    if cycle in ("", now.vectors.cycle) and produced in left and _has_to_follow(workspace, produced, now):
        _roll_both(workspace, now, served, reason, author)  # it was ended between the two moves, and is asked for again
        return now
    if cycle:
        known = [pair for pair in pairs if pair.vectors.cycle == cycle]
        known = [pair for pair in known if _has_vectors(workspace, pair)] or known  # those made anew, not those before
    else:
        known = [pair for pair in pairs if pair.is_of != now.is_of and pair.vectors.digest not in gone]
    if not known:
        raise ConfigError(
            f"cycle {cycle} was never served" if cycle else "nothing was served before",
            expected=f"one of {', '.join(sorted({pair.vectors.cycle for pair in pairs}))}",
            next_command="trnpipe serving show",
        )
    target = known[-1]
    if target.is_of == now.is_of:
        return now
    _check_vectors(workspace, target)
    if target.digest != now.digest and _has_to_follow(workspace, produced, target):
        _roll_both(workspace, target, served, reason, author)
    else:
        _put(workspace, target, served, SERVING, action="rolled_back", reason=one_line(reason), author=author)
    after = read_pair(workspace, model)
    return after[0] if after else target


def _has_to_follow(workspace: Storage, produced: str | None, pair: Pair) -> bool:
    """Whether production is at another model (its digest) than that of a pair, which was in production too."""
    if produced in (None, pair.digest):
        return False
    return pair.digest in {entry.digest for entry in changes_of(read_history(workspace, pair.model))}


def _roll_both(
    workspace: Storage,
    pair: Pair,
    served: tuple[Pair, str],
    reason: str,
    author: Author,
    target: Production | None = None,
) -> Pointer:
    """`target`: which of the times that the pair's model was in production; None: the last."""
    checkpoint = key_in(workspace, pair.checkpoint) or pair.checkpoint  # earlier versions kept a URI as it was typed
    checkpoint, generation = (target.checkpoint, target.generation) if target else (checkpoint, None)
    read_checkpoint(workspace, checkpoint, every_byte=True)  # before anything moves
    _check_vectors(workspace, pair)
    if served[0].is_of != pair.is_of:
        _put(workspace, pair, served, SERVING, action="rolled_back", reason=one_line(reason), author=author)
    return roll_back(workspace, pair.model, checkpoint, reason=reason, author=author, generation=generation)


def _put(workspace: Storage, pair: Pair, found: tuple[Pair, str] | None, role: Role, **changes: object) -> Pair:
    """Write what was there into the history, then the pair in its place, with `changes` in its fields.

    Raises TransientError when another did.
    """
    now, etag = found or (None, "")
    changes["generation"] = (now.generation if now else 0) + 1
    written = pair.model_copy(update=changes | {"replaced": now.vectors.digest if now else None})
    key, data = pair_key(pair.model, role), written.model_dump_json(indent=1).encode() + b"\n"
    if now is not None and role == SERVING:
        past = f"{FOLDER}/{pair.model}/pairs/{now.generation:08d}.json"
        workspace.write_if_absent(past, now.model_dump_json(indent=1).encode() + b"\n")
    if not (workspace.write_if_match(key, data, etag) if now else workspace.write_if_absent(key, data)):
        raise TransientError(
            f"another has changed {workspace.uri(key)} meanwhile",
            expected="the pair that this decision was made against",
            next_command="run the same command again",
        )
    return written


def _rolled_back_vectors(pairs: Iterable[Pair]) -> frozenset[str]:
    """Digests of vectors that were rolled back from and were not served again since."""
    gone: set[str] = set()
    for pair in pairs:
        if pair.action == "rolled_back" and pair.replaced is not None:
            gone.add(pair.replaced)
        gone.discard(pair.vectors.digest)
    return frozenset(gone)


def _has_vectors(workspace: Storage, pair: Pair) -> bool:
    found = read_manifest(workspace, pair.vectors.prefix)
    return found is not None and found.digest == pair.vectors.digest


def _check_vectors(workspace: Storage, pair: Pair) -> None:
    if not _has_vectors(workspace, pair):
        raise CheckpointError(
            f"{workspace.uri(pair.vectors.prefix)} does not hold the vectors that were verified",
            expected=f"those with the digest {pair.vectors.digest}",
            next_command="trnpipe serving show; choose another cycle",
        )


def _parsed(workspace: Storage, key: str) -> Pair:
    try:
        return Pair.model_validate_json(workspace.read_bytes(key))
    except ValidationError as error:
        raise CheckpointError(
            f"{workspace.uri(key)} is no pair of a model and vectors: {error.errors(include_url=False)[0]['msg']}",
            expected="what trnpipe embed verify wrote there",
            next_command="put back the newest file below pairs/ beside it, or an earlier version of the object",
        ) from error
