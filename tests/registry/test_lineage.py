"""From a model back to its root."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.store import WEIGHTS, Best, Origin, Parent
from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.checkpoints import Ancestor, lineage, read_checkpoint
from pipeline.registry.records import CheckpointRef, StoredVerdict, store_verdict, verdict_key
from tests.registry.cases import MODEL, child_of, digest_of, make_checkpoint, prefix
from tests.registry.conftest import ON_BOTH, Make

DAYS = {f"dt=2026-01-0{day}": f"print-{day}" for day in range(1, 5)}


def days(last: int) -> dict[str, Any]:
    """State of a model that has seen the first days."""
    return {"partitions": dict(list(DAYS.items())[:last]), "watermark": f"2026-01-0{last}"}


@pytest.fixture
def family(workspace: Storage, make: Make) -> tuple[str, str, str]:
    """Root, child, grandchild."""
    root = make("c1", 300, **days(2))
    child = make("c2", 40, **child_of(workspace, root, **days(3)))
    return root, child, make("c3", 1, **child_of(workspace, child, **days(4)))


@ON_BOTH
def test_back_to_the_root(workspace: Storage, family: tuple[str, str, str]) -> None:
    root, child, grandchild = family
    found = lineage(workspace, grandchild)
    assert [ancestor.checkpoint for ancestor in found] == [grandchild, child, root]
    assert [ancestor.digest for ancestor in found] == [digest_of(workspace, place) for place in reversed(family)]
    assert [(a.cycle, a.step, a.watermark) for a in found] == [
        ("c3", 1, "2026-01-04"),
        ("c2", 40, "2026-01-03"),
        ("c1", 300, "2026-01-02"),
    ]
    assert [list(a.partitions) for a in found] == [["dt=2026-01-04"], ["dt=2026-01-03"], list(DAYS)[:2]]
    assert [(a.settings_hash, a.code_version, a.note) for a in found] == [
        ("settings-c3", "1.0", ""),
        ("settings-c2", "1.0", ""),
        ("settings-c1", "1.0", ""),
    ]
    assert lineage(workspace, root) == found[2:]


def test_metrics_from_wherever_they_are_known(workspace: Storage, make: Make) -> None:
    place = make("c1", 5, best=Best(step=5, metric="ndcg", value=0.25))
    assert lineage(workspace, place)[0].figures == {"valid_ndcg": 0.25}
    verdict = StoredVerdict(
        model=MODEL,
        cycle="c1",
        candidate=CheckpointRef(checkpoint=place, digest=digest_of(workspace, place)),
        incumbent=None,
        promote=True,
        reasons=("better",),
        figures={"mrr": 0.75, "ece": float("nan")},
        settings_hash="h",
        code_version="v",
        at=datetime.now(UTC),
    )
    other = CheckpointRef(checkpoint=prefix("c1", 4), digest="0" * 64)
    for candidate, more in ((other, {}), (verdict.candidate, {"mrr": 0.75})):
        store_verdict(workspace, verdict.model_copy(update={"candidate": candidate}))
        assert lineage(workspace, place)[0].figures == {"valid_ndcg": 0.25} | more
    workspace.write_bytes(verdict_key("c1"), b"{}")
    assert lineage(workspace, place)[0].figures == {"valid_ndcg": 0.25}


def test_a_root_that_was_imported_tells_from_where(workspace: Storage, make: Make) -> None:
    origin = Origin(uri="file:///models/minilm", format="sentence-transformers", fingerprint="f")
    child = make("c1", **child_of(workspace, make("imported", 0, origin=origin)))
    notes = [ancestor.note for ancestor in lineage(workspace, child)]
    assert notes == ["", "it was imported from file:///models/minilm (sentence-transformers)"]


@pytest.mark.fault
def test_a_parent_that_is_gone_ends_it_with_a_note(workspace: Storage, family: tuple[str, str, str]) -> None:
    root, child, grandchild = family
    gone = digest_of(workspace, root)
    workspace.delete_prefix(root)
    last = lineage(workspace, grandchild)[-1]
    note = f"it cannot be read: {workspace.uri(root)} is not a committed checkpoint"
    assert last == Ancestor(workspace.uri(root), gone, "c1", 300, note=note)
    assert len(lineage(workspace, child)) == 2


@pytest.mark.fault
def test_a_parent_that_was_trained_again_is_another(
    workspace: Storage, family: tuple[str, str, str], make: Make
) -> None:
    root, child, _ = family
    workspace.delete_prefix(root)
    make("c1", 300, settings_hash="others")
    last = lineage(workspace, child)[-1]
    assert last.checkpoint == workspace.uri(root) and "has changed: digest" in last.note


def test_a_workspace_that_was_moved(workspace: Storage, family: tuple[str, str, str], tmp_path: Path) -> None:
    before = lineage(workspace, family[2])
    shutil.move(tmp_path / "workspace", tmp_path / "elsewhere")
    assert lineage(open_storage(str(tmp_path / "elsewhere")), family[2]) == before


def test_a_parent_in_another_workspace(workspace: Storage, tmp_path: Path, make: Make) -> None:
    other = open_storage(str(tmp_path / "other"))
    root = make_checkpoint(other, tmp_path, "c1")
    make("c1", **days(1))
    child = make("c2", **child_of(other, root))
    found = lineage(workspace, child)
    assert found[-1].note == "it is in a different workspace" and found[-1].checkpoint == other.uri(root)


@pytest.mark.fault
@pytest.mark.parametrize("tail", ["../../etc", "/checkpoints/../../x", "/checkpoints/", "//", "\x1b[2J"])
def test_a_parent_with_a_hostile_name(workspace: Storage, make: Make, tail: str) -> None:
    for root in (workspace.root, "s3://other"):
        parent = Parent(uri=f"{root}/{tail}", digest="0" * 64, cycle="../..", step=1)
        child = make("c" + str(len(root)), parent=parent)
        assert lineage(workspace, child)[-1].note == "it is in a different workspace"


@pytest.mark.fault
def test_a_circle_ends(workspace: Storage, family: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No content can name itself as its ancestor, but a forger who breaks the checksums might."""
    root, _, grandchild = family
    last = read_checkpoint(workspace, grandchild)

    def forged(storage: Storage, place: str) -> Any:
        known = read_checkpoint(storage, place)
        parent = Parent(uri=storage.uri(grandchild), digest=last.digest, cycle="c3", step=1)
        if place == root:
            object.__setattr__(known, "state", known.state.model_copy(update={"parent": parent}))
        return known

    monkeypatch.setattr("pipeline.registry.checkpoints.read_checkpoint", forged)
    found = lineage(workspace, grandchild)
    assert len(found) == 4 and found[-1].note == "the lineage is circular"


def test_what_is_no_checkpoint_has_no_lineage(workspace: Storage, make: Make) -> None:
    make("c1")
    workspace.write_bytes("tokens/x/file", b"x")
    for place in ("tokens/x", "checkpoints/c1", prefix("none")):
        with pytest.raises(CheckpointError, match="is not a committed checkpoint"):
            lineage(workspace, place)
    with pytest.raises(ConfigError):
        lineage(workspace, "../x")


@pytest.mark.fault
def test_weights_are_not_read(workspace: Storage, family: tuple[str, str, str]) -> None:
    """A lineage of hundreds of models must not download them."""
    for place in family:
        workspace.delete([f"{place}/{WEIGHTS}"])
    assert len(lineage(workspace, family[2])) == 3
