"""The pair that is served: model and vectors belong together whatever happens, and whoever looks when."""

from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from pipeline.core.errors import CheckpointError, ConfigError, TransientError
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.storage import Storage
from pipeline.registry.model import (
    DeployedPair,
    Vectors,
    pair_key,
    past_pairs,
    read_pair,
    roll_back_model,
    roll_back_vectors,
    serve_verified_pair,
)
from pipeline.registry.promote import promote
from tests.registry.cases import AUTHOR, MODEL, digest_of, passed, production
from tests.registry.conftest import ON_BOTH, Make


def in_production(workspace: Storage, place: str) -> None:
    promote(workspace, MODEL, place, expected=production(workspace), decision=passed(workspace, place), author=AUTHOR)


def embedded(workspace: Storage, scratch: Path, cycle: str, place: str, generation: int) -> DeployedPair:
    """Commit the vectors of a cycle, a few bytes, made with the checkpoint; the pair of both."""
    prefix = f"embeddings/{cycle}"
    if read_manifest(workspace, prefix) is None:
        folder = Path(mkdtemp(dir=scratch))
        (folder / "part-0.parquet").write_bytes(f"vectors of {cycle}".encode())
        commit_dir(workspace, folder, prefix, kind="embeddings", fields={"cycle": cycle})
    vectors = Vectors(cycle=cycle, digest=digest_of(workspace, prefix), generation=generation, rows=1, dim=8)
    digest = digest_of(workspace, place)
    return DeployedPair(model=MODEL, checkpoint=place, digest=digest, vectors=vectors, author=AUTHOR)


def served(workspace: Storage) -> tuple[str, str]:
    found = read_pair(workspace, MODEL)
    assert found is not None
    return found[0].checkpoint, found[0].vectors.cycle


@pytest.fixture
def two(workspace: Storage, make: Make, tmp_path: Path) -> tuple[DeployedPair, DeployedPair]:
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
    assert "unchanged" in serve_verified_pair(workspace, embedded(workspace, tmp_path, "c1b", first, 2))
    later = embedded(workspace, tmp_path, "c2", second, 3)
    serve_verified_pair(workspace, later)
    assert "already refers to these vectors (generation 2)" in serve_verified_pair(workspace, later)
    assert served(workspace) == (second, "c2")
    assert "newer vectors" in serve_verified_pair(workspace, embedded(workspace, tmp_path, "c0", second, 2))
    assert [pair.vectors.cycle for pair in past_pairs(workspace, MODEL)] == ["c1", "c2"]
    assert {pair.vectors.prefix for pair in past_pairs(workspace, MODEL)} == {"embeddings/c1", "embeddings/c2"}


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


def test_a_race_has_one_winner(workspace: Storage, tmp_path: Path, two: tuple[DeployedPair, DeployedPair]) -> None:
    found = read_pair(workspace, MODEL)
    newer = [embedded(workspace, tmp_path, f"c2{end}", two[1].checkpoint, 3) for end in "xy"]
    stale = Racing(workspace, lambda: serve_verified_pair(workspace, newer[0]))
    with pytest.raises(TransientError, match="another process has changed"):
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


def test_a_damaged_pair_is_named(workspace: Storage, two: tuple[DeployedPair, DeployedPair]) -> None:
    workspace.write_bytes(pair_key(MODEL), b'{"model": "relevance"}')
    with pytest.raises(CheckpointError, match="is not a valid pair"):
        read_pair(workspace, MODEL)


def test_a_verify_that_saw_production_before_a_rollback_loses(
    workspace: Storage, make: Make, tmp_path: Path, two: tuple[DeployedPair, DeployedPair]
) -> None:
    """The model in production waits for its vectors, and is rolled back just when they are verified."""
    third = make("c3")
    in_production(workspace, third)
    pair = embedded(workspace, tmp_path, "c3", third, 3)
    racing = Racing(workspace, lambda: roll_back_model(workspace, MODEL, "", reason="bad", author=AUTHOR))
    with pytest.raises(TransientError, match="another process has changed"):
        serve_verified_pair(racing, pair)
    assert "is in production" in serve_verified_pair(workspace, pair)
    found = production(workspace)
    assert found is not None and found.checkpoint == two[1].checkpoint and served(workspace) == (found.checkpoint, "c2")


def test_bad_vectors_of_a_good_model(
    workspace: Storage, tmp_path: Path, two: tuple[DeployedPair, DeployedPair]
) -> None:
    """Only serving.json moves, to vectors of the same model, and the bad ones do not come back by themselves."""
    newer = embedded(workspace, tmp_path, "c2b", two[1].checkpoint, 3)
    serve_verified_pair(workspace, newer)
    before = production(workspace)
    with pytest.raises(ConfigError, match="no reason"):
        roll_back_vectors(workspace, MODEL, "", reason=" ", author=AUTHOR)
    back = roll_back_vectors(workspace, MODEL, "", reason="bad part", author=AUTHOR)
    found = read_pair(workspace, MODEL)
    assert found is not None and back == found[0] and (back.vectors.cycle, back.reason) == ("c2", "bad part")
    assert "serving rollback c2b --reason" in serve_verified_pair(workspace, newer)
    assert roll_back_vectors(workspace, MODEL, "c2b", reason="was good", author=AUTHOR).vectors.cycle == "c2b"
    assert roll_back_vectors(workspace, MODEL, "c2b", reason="twice", author=AUTHOR).generation == 5
    for cycle in ("c1", "c9"):  # of another model, and unknown
        with pytest.raises(ConfigError, match=f"from cycle {cycle} were ever deployed"):
            roll_back_vectors(workspace, MODEL, cycle, reason="x", author=AUTHOR)
    workspace.delete_prefix("embeddings/c2")
    with pytest.raises(CheckpointError, match="does not contain the verified vectors"):
        roll_back_vectors(workspace, MODEL, "c2", reason="x", author=AUTHOR)
    assert production(workspace) == before


def test_vectors_of_a_cycle_that_were_made_anew_are_served(
    workspace: Storage, tmp_path: Path, two: tuple[DeployedPair, DeployedPair]
) -> None:
    serve_verified_pair(workspace, embedded(workspace, tmp_path, "c3", two[1].checkpoint, 3))
    workspace.delete_prefix("embeddings/c2")
    folder = Path(mkdtemp(dir=tmp_path))
    (folder / "part-0.parquet").write_bytes(b"of another dtype")
    commit_dir(workspace, folder, "embeddings/c2", kind="embeddings", fields={"cycle": "c2"})
    anew = embedded(workspace, tmp_path, "c2", two[1].checkpoint, 4)
    assert serve_verified_pair(workspace, anew).startswith("serving.json: ")
    roll_back_vectors(workspace, MODEL, "c3", reason="bad", author=AUTHOR)
    back = roll_back_vectors(workspace, MODEL, "c2", reason="good", author=AUTHOR)
    assert back.vectors.digest == anew.vectors.digest != two[1].vectors.digest


def test_the_history_is_whole_and_goes_on_where_serving_json_is_lost(
    workspace: Storage, tmp_path: Path, two: tuple[DeployedPair, DeployedPair]
) -> None:
    newer = embedded(workspace, tmp_path, "c2b", two[1].checkpoint, 3)
    serve_verified_pair(workspace, newer)
    roll_back_vectors(workspace, MODEL, "", reason="a part was empty", author=AUTHOR)
    before, lost = past_pairs(workspace, MODEL), workspace.read_bytes(pair_key(MODEL))
    newest = max(stat.key for stat in workspace.list(f"registry/{MODEL}/pairs"))
    assert workspace.read_bytes(newest) == lost, "as the message says that names a damaged one"
    workspace.delete([pair_key(MODEL)])
    assert "unchanged" in serve_verified_pair(workspace, newer)
    serve_verified_pair(workspace, embedded(workspace, tmp_path, "c2c", two[1].checkpoint, 4))
    after = past_pairs(workspace, MODEL)
    assert after[:-1] == before and after[-1].generation == before[-1].generation + 1
    assert after[-1].replaced == before[-1].vectors.digest


def test_records_of_earlier_versions_are_read(
    workspace: Storage, make: Make, two: tuple[DeployedPair, DeployedPair]
) -> None:
    """They have no id, and the last is not in the history; a challenger was promoted to what is served."""
    workspace.delete([f"registry/{MODEL}/pairs/00000002.json"])
    for key in [pair_key(MODEL), *(stat.key for stat in workspace.list(f"registry/{MODEL}/pairs"))]:
        pair = DeployedPair.model_validate_json(workspace.read_bytes(key)).model_copy(update={"action": "promoted"})
        workspace.write_bytes(key, pair.model_dump_json(exclude={"id", "production_follows"}).encode())
    assert [pair.vectors.cycle for pair in past_pairs(workspace, MODEL)] == ["c1", "c2"]
    roll_back_model(workspace, MODEL, "", reason="r", author=AUTHOR)
    assert [pair.vectors.cycle for pair in past_pairs(workspace, MODEL)] == ["c1", "c2", "c1"]
