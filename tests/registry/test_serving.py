"""The pair that is served: model and vectors belong together whatever happens, and whoever looks when."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from pipeline.core.errors import CheckpointError, ConfigError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.storage import Storage, open_storage
from pipeline.registry import serving
from pipeline.registry.promote import promote
from pipeline.registry.serving import (
    CHALLENGER,
    SERVING,
    Pair,
    Vectors,
    pair_key,
    past_pairs,
    promote_challenger,
    read_pair,
    roll_back_model,
    roll_back_pair,
    serve_verified_pair,
)
from tests.registry.cases import AUTHOR, MODEL, digest_of, make_checkpoint, passed, production
from tests.registry.conftest import ON_BOTH, Make


def in_production(workspace: Storage, place: str) -> None:
    promote(workspace, MODEL, place, expected=production(workspace), decision=passed(workspace, place), author=AUTHOR)


def embedded(workspace: Storage, scratch: Path, cycle: str, place: str, generation: int) -> Pair:
    """Commit the vectors of a cycle, a few bytes, made with the checkpoint; the pair of both."""
    prefix = f"embeddings/{cycle}"
    if read_manifest(workspace, prefix) is None:
        folder = Path(mkdtemp(dir=scratch))
        (folder / "part-0.parquet").write_bytes(f"vectors of {cycle}".encode())
        commit_dir(workspace, folder, prefix, kind="embeddings", fields={"cycle": cycle})
    vectors = Vectors(cycle=cycle, digest=digest_of(workspace, prefix), generation=generation, rows=1, dim=8)
    digest = digest_of(workspace, place)
    return Pair(model=MODEL, checkpoint=place, digest=digest, vectors=vectors, author=AUTHOR)


def served(workspace: Storage) -> tuple[str, str]:
    found = read_pair(workspace, MODEL)
    assert found is not None
    return found[0].checkpoint, found[0].vectors.cycle


@pytest.fixture
def two(workspace: Storage, make: Make, tmp_path: Path) -> tuple[Pair, Pair]:
    """Two cycles, both served: the second is."""
    pairs = []
    for number, cycle in enumerate(("c1", "c2"), 1):
        place = make(cycle)
        in_production(workspace, place)
        pairs.append(embedded(workspace, tmp_path, cycle, place, number))
        assert serve_verified_pair(workspace, pairs[-1]).startswith("serving.json: ")
    return pairs[0], pairs[1]


@ON_BOTH
def test_production_leads_and_the_pair_follows_after_verify(workspace: Storage, make: Make, tmp_path: Path) -> None:
    first, second = make("c1"), make("c2")
    assert read_pair(workspace, MODEL) is None
    in_production(workspace, first)
    pair = embedded(workspace, tmp_path, "c1", first, 1)
    serve_verified_pair(workspace, pair)
    in_production(workspace, second)
    assert served(workspace) == (first, "c1")  # hours before the vectors of the second exist
    assert "stays" in serve_verified_pair(workspace, embedded(workspace, tmp_path, "c1b", first, 2))
    later = embedded(workspace, tmp_path, "c2", second, 3)
    serve_verified_pair(workspace, later)
    assert "already, generation 2" in serve_verified_pair(workspace, later)
    assert served(workspace) == (second, "c2")
    assert "newer vectors" in serve_verified_pair(workspace, embedded(workspace, tmp_path, "c0", second, 2))
    assert [pair.vectors.cycle for pair in past_pairs(workspace, MODEL)] == ["c1", "c2"]
    assert {pair.vectors.prefix for pair in past_pairs(workspace, MODEL)} == {"embeddings/c1", "embeddings/c2"}


def test_nothing_is_served_of_what_is_not_in_production(workspace: Storage, make: Make, tmp_path: Path) -> None:
    pair = embedded(workspace, tmp_path, "c1", make("c1"), 1)
    assert "nothing is in production" in serve_verified_pair(workspace, pair)
    assert read_pair(workspace, MODEL) is None


def test_a_model_is_rolled_back_with_its_vectors(workspace: Storage, two: tuple[Pair, Pair]) -> None:
    first, second = two
    now = roll_back_model(workspace, MODEL, "", reason="bad", author=AUTHOR)
    assert (now.checkpoint, served(workspace)) == (first.checkpoint, (first.checkpoint, "c1"))
    assert "stays" in serve_verified_pair(workspace, second)  # its verify is run again: it does not come back by itself
    with pytest.raises(ConfigError, match="nothing before"):
        roll_back_model(workspace, MODEL, "", reason="bad", author=AUTHOR)
    again = roll_back_model(workspace, MODEL, second.checkpoint, reason="it was good", author=AUTHOR)
    assert again.checkpoint == second.checkpoint
    assert served(workspace) == (second.checkpoint, "c2")


def test_rolling_back_again_goes_further_back_and_never_to_what_was_withdrawn(
    workspace: Storage, two: tuple[Pair, Pair]
) -> None:
    first, second = two
    decision = passed(workspace, first.checkpoint).model_copy(update={"forced": "it was better"})
    promote(
        workspace, MODEL, first.checkpoint, expected=production(workspace), decision=decision, author=AUTHOR
    )  # A, B, A
    serve_verified_pair(workspace, first)
    assert served(workspace) == (first.checkpoint, "c1")
    for expected in (second, first):
        assert roll_back_model(workspace, MODEL, "", reason="bad", author=AUTHOR).checkpoint == expected.checkpoint
        assert served(workspace) == (expected.checkpoint, expected.vectors.cycle)
    with pytest.raises(ConfigError, match="nothing before"):
        roll_back_model(workspace, MODEL, "", reason="bad", author=AUTHOR)


def test_without_vectors_of_it_neither_moves(
    workspace: Storage, make: Make, tmp_path: Path, two: tuple[Pair, Pair]
) -> None:
    third = make("c3")
    in_production(workspace, third)
    serve_verified_pair(workspace, embedded(workspace, tmp_path, "c3", third, 3))
    workspace.delete_prefix("embeddings/c2")
    before = production(workspace)
    with pytest.raises(ConfigError, match="no vectors made with"):
        roll_back_model(workspace, MODEL, "", reason="bad", author=AUTHOR)
    assert (production(workspace), served(workspace)) == (before, (third, "c3"))
    roll_back_model(workspace, MODEL, "", reason="bad", author=AUTHOR, without_vectors=True)
    found = production(workspace)
    assert found is not None and found.checkpoint == two[1].checkpoint and served(workspace) == (third, "c3")


def test_bad_vectors_of_a_good_model(workspace: Storage, tmp_path: Path, two: tuple[Pair, Pair]) -> None:
    """Only serving.json moves, and the vectors do not come back by themselves."""
    newer = embedded(workspace, tmp_path, "c2b", two[1].checkpoint, 3)
    serve_verified_pair(workspace, newer)
    before = production(workspace)
    with pytest.raises(ConfigError, match="no reason"):
        roll_back_pair(workspace, MODEL, "", reason=" ", author=AUTHOR)
    assert roll_back_pair(workspace, MODEL, "", reason="bad part", author=AUTHOR).vectors.cycle == "c2"
    assert production(workspace) == before
    assert "rolled back from these vectors" in serve_verified_pair(workspace, newer)
    assert roll_back_pair(workspace, MODEL, "c2b", reason="was good", author=AUTHOR).vectors.cycle == "c2b"
    assert roll_back_pair(workspace, MODEL, "c2b", reason="twice", author=AUTHOR).generation == 5
    assert roll_back_pair(workspace, MODEL, "c1", reason="all bad", author=AUTHOR).checkpoint == two[0].checkpoint
    found = production(workspace)
    assert found is not None and found.checkpoint == two[0].checkpoint  # production follows the model
    with pytest.raises(ConfigError, match="never served"):
        roll_back_pair(workspace, MODEL, "c9", reason="x", author=AUTHOR)


def test_a_newer_model_that_waits_for_its_vectors_stays_in_production(
    workspace: Storage, make: Make, tmp_path: Path, two: tuple[Pair, Pair]
) -> None:
    serve_verified_pair(workspace, embedded(workspace, tmp_path, "c2b", two[1].checkpoint, 3))
    third = make("c3")
    in_production(workspace, third)  # passed the gate; embedding takes hours
    before = production(workspace)
    assert roll_back_pair(workspace, MODEL, "", reason="a part was empty", author=AUTHOR).vectors.cycle == "c2"
    assert production(workspace) == before
    assert serve_verified_pair(workspace, embedded(workspace, tmp_path, "c3", third, 4)).startswith("serving.json: ")
    assert roll_back_pair(workspace, MODEL, "c2", reason="all bad", author=AUTHOR).vectors.cycle == "c2"
    found = production(workspace)
    assert found is not None and found.checkpoint == two[1].checkpoint  # of another model than was served


def test_vectors_of_a_cycle_that_were_made_anew_are_served(
    workspace: Storage, tmp_path: Path, two: tuple[Pair, Pair]
) -> None:
    workspace.delete_prefix("embeddings/c2")
    folder = Path(mkdtemp(dir=tmp_path))
    (folder / "part-0.parquet").write_bytes(b"of another dtype")
    commit_dir(workspace, folder, "embeddings/c2", kind="embeddings", fields={"cycle": "c2"})
    anew = embedded(workspace, tmp_path, "c2", two[1].checkpoint, 2)
    assert anew.vectors.digest != two[1].vectors.digest
    assert serve_verified_pair(workspace, anew).startswith("serving.json: ")
    assert roll_back_pair(workspace, MODEL, "c1", reason="bad", author=AUTHOR).vectors.cycle == "c1"
    back = roll_back_pair(workspace, MODEL, "c2", reason="good", author=AUTHOR)
    assert back.vectors.digest == anew.vectors.digest  # those that are there


@pytest.mark.parametrize("asked", ["", "c1"])
def test_a_rollback_that_was_ended_between_its_moves_is_ended_by_the_same_command(
    workspace: Storage, two: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    def ended(*given: Any, **more: Any) -> Any:
        raise Preempted("SIGTERM")

    with monkeypatch.context() as patch, pytest.raises(Preempted):
        patch.setattr(serving, "roll_back", ended)
        roll_back_pair(workspace, MODEL, asked, reason="bad", author=AUTHOR)
    assert served(workspace) == (two[0].checkpoint, "c1")
    assert roll_back_pair(workspace, MODEL, asked, reason="bad", author=AUTHOR).vectors.cycle == "c1"
    found = production(workspace)
    assert found is not None and (found.checkpoint, served(workspace)) == (two[0].checkpoint, (two[0].checkpoint, "c1"))
    if not asked:
        with pytest.raises(ConfigError, match="nothing was served before"):
            roll_back_pair(workspace, MODEL, "", reason="bad", author=AUTHOR)


def test_a_pair_whose_checkpoint_was_named_by_its_uri_can_be_rolled_back_to(
    workspace: Storage, make: Make, tmp_path: Path
) -> None:
    first, second = make("c1"), make("c2")
    in_production(workspace, first)
    pair = embedded(workspace, tmp_path, "c1", first, 1)
    serve_verified_pair(workspace, pair.model_copy(update={"checkpoint": workspace.uri(first)}))
    in_production(workspace, second)
    serve_verified_pair(workspace, embedded(workspace, tmp_path, "c2", second, 2))
    assert roll_back_model(workspace, MODEL, "", reason="bad", author=AUTHOR).checkpoint == first


def test_a_challenger_is_promoted_in_one_write(
    workspace: Storage, make: Make, tmp_path: Path, two: tuple[Pair, Pair]
) -> None:
    with pytest.raises(ConfigError, match="no challenger"):
        promote_challenger(workspace, MODEL, reason="", author=AUTHOR)
    other = make("c3")
    pair = embedded(workspace, tmp_path, "c3", other, 3)
    assert serve_verified_pair(workspace, pair, CHALLENGER).startswith("serving-challenger.json: ")
    assert served(workspace) == (two[1].checkpoint, "c2")
    with pytest.raises(ConfigError, match="not in production"):
        promote_challenger(workspace, MODEL, reason="", author=AUTHOR)
    assert promote_challenger(workspace, MODEL, reason="the test was won", author=AUTHOR).vectors.cycle == "c3"
    assert served(workspace) == (other, "c3")
    assert promote_challenger(workspace, MODEL, reason="", author=AUTHOR).generation == 3  # twice is fine


def test_a_race_has_one_winner(workspace: Storage, tmp_path: Path, two: tuple[Pair, Pair]) -> None:
    found = read_pair(workspace, MODEL)
    newer = [embedded(workspace, tmp_path, f"c2{end}", two[1].checkpoint, 3) for end in "xy"]
    stale = Racing(workspace, lambda: serve_verified_pair(workspace, newer[0]))
    with pytest.raises(TransientError, match="meanwhile"):
        serve_verified_pair(stale, newer[1])
    assert found is not None and served(workspace) == (two[1].checkpoint, "c2x")


class Racing:
    """A storage on which another is quicker, just before the first conditional write."""

    def __init__(self, storage: Storage, other: Callable[[], object]) -> None:
        self._storage, self._other = storage, other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        self._other()
        return self._storage.write_if_match(key, data, etag)


def test_a_damaged_pair_is_named(workspace: Storage, two: tuple[Pair, Pair]) -> None:
    workspace.write_bytes(pair_key(MODEL), b'{"model": "relevance"}')
    with pytest.raises(CheckpointError, match="is no pair"):
        read_pair(workspace, MODEL)


class Killed(BaseException):
    """kill -9, between two writes."""


class Dying:
    """A storage of a process that is killed before or after its n-th write; `look` is called after every write."""

    def __init__(self, storage: Storage, writes: int, look: Callable[[], None]) -> None:
        self._storage, self._left, self._look = storage, writes, look

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        if not name.startswith(("write_", "delete", "upload")):
            return found

        def write(*given: Any) -> Any:
            if self._left == 0:
                raise Killed
            self._left -= 1
            done = found(*given)
            self._look()
            return done

        return write


SCHEDULES = [pytest.param(40, 1), pytest.param(1000, 2, marks=pytest.mark.thorough)]


@pytest.mark.parametrize(("schedules", "seed"), SCHEDULES)
def test_whoever_follows_the_pair_never_mixes(schedules: int, seed: int, tmp_path: Path) -> None:
    """Cycles, kills and rollbacks at random; after every write of anybody serving.json names what belongs together."""
    rng = random.Random(seed)
    moved = 0
    for number in range(schedules):
        moved += _schedule(rng, tmp_path / str(number))
    assert moved > schedules  # the pair was moved, too


def _schedule(rng: random.Random, folder: Path) -> int:
    folder.mkdir()
    workspace = open_storage(f"file://{folder}/workspace", stop=StopSignal())
    places, pairs = list[str](), dict[str, Pair]()

    def look() -> None:
        for role in (SERVING, CHALLENGER):
            if found := read_pair(workspace, MODEL, role):
                pair = found[0]
                assert pairs[pair.vectors.digest].is_of == pair.is_of
                manifest = read_manifest(workspace, pair.vectors.prefix)
                assert manifest is not None and manifest.digest == pair.vectors.digest

    @contextmanager
    def dying() -> Iterator[Any]:
        """Killed at some write, or not at all; what cannot be done is refused."""
        with suppress(Killed, ConfigError, TransientError):
            yield Dying(workspace, rng.choice([0, 1, 2, 3, 4, 10**9, 10**9]), look)

    for step in range(rng.randint(4, 8)):
        match rng.choice(["cycle", "cycle", "cycle", "again", "model", "pair", "challenge", "ab"]):
            case "cycle":
                place = make_checkpoint(workspace, folder, f"c{step}")
                places.append(place)
                with dying() as storage:
                    in_production(storage, place)
                pair = embedded(workspace, folder, f"c{step}", place, step)
                pairs[pair.vectors.digest] = pair
                with dying() as storage:
                    serve_verified_pair(storage, pair)
            case "again" if pairs:
                with dying() as storage:
                    serve_verified_pair(storage, rng.choice(list(pairs.values())))
            case "model":
                to = rng.choice(["", *places])
                for _ in range(2):  # what was killed is run again
                    with dying() as storage:
                        roll_back_model(storage, MODEL, to, reason="r", author=AUTHOR)
            case "pair":
                with dying() as storage:
                    cycle = rng.choice(["", *(pair.vectors.cycle for pair in pairs.values())])
                    roll_back_pair(storage, MODEL, cycle, reason="r", author=AUTHOR)
            case "challenge" if pairs:
                with dying() as storage:
                    serve_verified_pair(storage, rng.choice(list(pairs.values())), CHALLENGER)
            case "ab":
                with dying() as storage:
                    promote_challenger(storage, MODEL, reason="r", author=AUTHOR)
        look()
    return len(past_pairs(workspace, MODEL))
