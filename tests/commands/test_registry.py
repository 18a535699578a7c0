"""`trnpipe registry` and `trnpipe serving` as people and machines use them."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.checkpoint.store import WEIGHTS
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.model import serve_verified_pair
from pipeline.registry.promote import promote
from pipeline.registry.records import CheckpointRef, StoredVerdict, pointer_key, store_verdict
from tests.registry.cases import (
    AUTHOR,
    MODEL,
    child_of,
    consistent,
    digest_of,
    make_checkpoint,
    passed,
    prefix,
    production,
    put,
)
from tests.registry.test_serving import embedded, in_production

Ask = Callable[..., str]
Family = tuple[str, str, str]


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "ws"))


@pytest.fixture
def ask(workspace: Storage, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run one command in the workspace, assert the exit code, and return what it printed."""

    def asked(*words: str, code: int = 0) -> str:
        found = cli.main([*words, "--workspace", workspace.root.removeprefix("file://")])
        printed = "".join(capsys.readouterr())
        assert found == code and "Traceback" not in printed, printed
        return printed

    return asked


@pytest.fixture
def family(workspace: Storage, tmp_path: Path) -> Family:
    """A root, which is in production, its child, and a grandchild."""
    root = make_checkpoint(workspace, tmp_path, "c1")
    child = make_checkpoint(workspace, tmp_path, "c2", **child_of(workspace, root))
    seen = {"partitions": {"dt=2026-01-01": "aa", "dt=2026-01-02": "bb"}, "watermark": "2026-01-02"}
    third = make_checkpoint(workspace, tmp_path, "c3", **child_of(workspace, child, **seen))
    put(workspace, root)
    return root, child, third


def judge(workspace: Storage, place: str, *, passes: bool = True, cycle: str = "") -> None:
    """Store what evaluate leaves behind, made against production as it is."""
    now = production(workspace)
    verdict = StoredVerdict(
        model=MODEL,
        cycle=cycle or place.split("/")[1],
        candidate=CheckpointRef(checkpoint=place, digest=digest_of(workspace, place)),
        incumbent=now.ref if now else None,
        promote=passes,
        reasons=("ndcg@10 +0.0120 [+0.0040, +0.0200]",) if passes else ("ndcg@10 -0.0300",),
        figures={"ndcg@10": 0.8},
        settings_hash="h",
        code_version="v",
        at=datetime.now(UTC),
    )
    store_verdict(workspace, verdict)


def test_the_only_model_need_not_be_named(workspace: Storage, tmp_path: Path, ask: Ask) -> None:
    place = make_checkpoint(workspace, tmp_path, "c1")

    def put_as(model: str) -> None:
        promote(workspace, model, place, expected=None, decision=passed(workspace, place), author=AUTHOR)

    put_as("other")
    assert ask("registry", "show").startswith(f"other | {place}")
    assert ask("serving", "show").startswith("other | nothing is served")
    assert place in ask("registry", "rollback", "--reason", "x", code=78)  # nothing was in production before it
    newer = make_checkpoint(workspace, tmp_path, "c2", **child_of(workspace, place))
    assert f"other: promoted by force {newer}" in ask("registry", "promote", newer, "--force", "fewer complaints")
    assert "one of other" in ask("registry", "show", "--model-name", "third", code=78)
    put_as("again")
    for words in (("registry", "show"), ("serving", "show"), ("export", "--out", f"{tmp_path}/out")):
        assert "one of again, other" in ask(*words, code=78)


def test_an_empty_workspace(ask: Ask, workspace: Storage) -> None:
    workspace.write_bytes("cycles/c1/events.jsonl", b"")
    assert ask("registry", "list").startswith("no models yet: ")
    assert ask("registry", "list", "--json") == "[]\n"
    assert ask("registry", "show") == "relevance | nothing is in production\n"
    document = json.loads(ask("registry", "show", "--json"))
    assert (document["checkpoint"], document["lineage"], document["history"]) == (None, [], [])
    ask("registry", "rollback", "--reason", "x", code=78)


def test_list_and_show(ask: Ask, workspace: Storage, family: Family) -> None:
    put(workspace, family[2], figures={"ndcg@10": 0.8})
    out = ask("registry", "list")
    assert out.startswith(f"relevance | {family[2]} | generation 2 | promoted 20") and out.endswith("by tester@host\n")
    (row,) = json.loads(ask("registry", "list", "--json"))
    assert (row["model"], row["production"]["checkpoint"]) == (MODEL, family[2])

    lines = ask("registry", "show").splitlines()
    assert [line.split(" | ")[0].strip() for line in lines[2:7:2]] == list(reversed(family))
    assert lines[2].endswith("data until 2026-01-02 | new dt=2026-01-02 | settings settings-c3 | code 1.0")
    assert lines[3] == "    valid_ndcg 0.5000"
    assert f"promoted {family[2]} | by tester@host" in lines[8] and lines[9] == "    better"
    document = json.loads(ask("registry", "show", "--json"))
    assert document["in_production"] and document["production"]["generation"] == 2
    assert [ancestor["checkpoint"] for ancestor in document["lineage"]] == list(reversed(family))
    assert [entry["checkpoint"] for entry in document["history"]] == [family[0], family[2]]

    path = workspace.local_path(family[1])
    names = (family[1], f"{family[1]}/", workspace.uri(family[1]), str(path))
    (answer,) = {ask("registry", "show", name, "--json") for name in names}
    document = json.loads(answer)
    assert (document["checkpoint"], document["in_production"], document["history"]) == (family[1], False, [])
    assert len(document["lineage"]) == 2


@pytest.mark.parametrize("name", ["s3://other/checkpoints/c1/step-1", "../x", "/etc", "checkpoints/c1/../../x"])
def test_a_checkpoint_elsewhere_is_refused(ask: Ask, family: Family, name: str) -> None:
    for action, *words in (("show",), ("promote",), ("rollback", "--reason", "x")):
        ask("registry", action, name, *words, code=78)


def test_promote_by_a_verdict(ask: Ask, workspace: Storage, family: Family) -> None:
    judge(workspace, family[1], cycle="again")
    ask("registry", "promote", family[1], code=80)  # the verdict of another cycle must be named
    words = ("registry", "promote", family[1], "--cycle", "again")
    assert ask(*words) == f"relevance: promoted {family[1]}, replacing {family[0]} | every byte verified\n"
    pointer = consistent(workspace).pointer
    assert pointer is not None and pointer.figures == {"ndcg@10": 0.8}
    assert pointer.verdict == "cycles/again/evaluate/verdict.json" and pointer.author.settings_hash
    assert "@" in pointer.author.by and pointer.reasons == ("ndcg@10 +0.0120 [+0.0040, +0.0200]",)
    assert f"unchanged, production is already {family[1]}" in ask(*words)
    assert consistent(workspace).pointer == pointer


def test_force(ask: Ask, workspace: Storage, family: Family) -> None:
    judge(workspace, family[1], passes=False)
    for empty in ("--force=", "--force= ", "--force"):
        ask("registry", "promote", family[1], empty, code=78)
    assert len(consistent(workspace).history) == 1
    assert f"promoted by force {family[1]}" in ask("registry", "promote", family[1], "--force", "the holdout is broken")
    pointer = consistent(workspace).pointer
    assert pointer is not None
    assert (pointer.action, pointer.reasons) == ("forced", ("forced: the holdout is broken", "ndcg@10 -0.0300"))
    workspace.write_bytes(f"{family[2]}/{WEIGHTS}", b"other weights 1")
    assert "model.safetensors" in ask("registry", "promote", family[2], "--force", "now", code=74)
    ask("registry", "promote", prefix("none"), "--force", "now", code=74)


@pytest.mark.parametrize(
    "words",
    [
        ("registry", "list", "--force", "x"),
        ("registry", "show", "--reason", "x"),
        ("registry", "promote", "c", "--json"),
        ("registry", "promote", "c", "--without-vectors"),
        ("registry", "rollback", "--force", "x"),
        ("serving", "rollback"),
        ("serving", "rollback", "c9", "--reason=x"),
        ("serving", "rollback", "--reason=x", "--json"),
        ("serving", "show", "--reason=x"),
        ("serving", "rollback", "--reason=x", "--model-name=other"),
    ],
)
def test_what_cannot_be_is_refused(ask: Ask, words: tuple[str, ...]) -> None:
    ask(*words, code=78)


@pytest.mark.fault
def test_a_damaged_pointer_does_not_hide_other_models(ask: Ask, workspace: Storage, family: Family) -> None:
    workspace.write_bytes(pointer_key("second"), b"{}")
    out = ask("registry", "list", code=74)
    assert f"relevance | {family[0]}" in out and "second | damaged" in out
    assert json.loads(ask("registry", "list", "--json", code=74))[1]["model"] == "second"
    assert "is not a valid pointer to a checkpoint" in ask("registry", "show", "--model-name", "second", code=74)


@pytest.mark.fault
def test_production_that_is_gone_still_shows_the_way_back(ask: Ask, workspace: Storage, family: Family) -> None:
    put(workspace, family[1])
    workspace.delete_prefix(family[1])
    out = ask("registry", "show", code=74)
    assert "damaged: " in out and f"promoted {family[0]}" in out
    ask("registry", "show", family[1], code=74)
    ask("registry", "rollback", "--reason", "it is gone")


@pytest.fixture
def served(workspace: Storage, tmp_path: Path) -> None:
    """Two cycles that were served."""
    for number, cycle in enumerate(("c1", "c2"), 1):
        place = make_checkpoint(workspace, tmp_path, cycle)
        in_production(workspace, place)
        pair = embedded(workspace, tmp_path, cycle, place, 2 * number)
        vectors = pair.vectors.model_copy(update={"rows": 18_000 * number})
        serve_verified_pair(workspace, pair.model_copy(update={"vectors": vectors}))


@pytest.mark.usefixtures("served")
def test_what_is_served_and_rolled_back_with_the_model(ask: Ask) -> None:
    text = ask("serving", "show")
    assert "serving checkpoints/c2/step-1 with 36,000 vectors of cycle c2 | generation 2" in text
    assert "previously serving checkpoints/c1/step-1" in text
    found = json.loads(ask("serving", "show", "--json"))
    assert found["serving"]["vectors"]["cycle"] == "c2"
    assert [pair["generation"] for pair in found["pairs"]] == [1, 2]
    assert "serving checkpoints/c2/step-1" in ask("registry", "show")
    text = ask("registry", "rollback", "--reason=bad")
    assert "rolled back to checkpoints/c1/step-1" in text and "vectors of cycle c1" in text
    assert ": 18,000 vectors fewer" in text


@pytest.mark.usefixtures("served")
def test_vectors_roll_back_alone(workspace: Storage, tmp_path: Path, ask: Ask) -> None:
    serve_verified_pair(workspace, embedded(workspace, tmp_path, "c2b", "checkpoints/c2/step-1", 5))
    text = ask("serving", "rollback", "--reason=a part was empty")
    assert "vectors of cycle c2 " in text and "a part was empty" in text
    assert "vectors of cycle c2b " in ask("serving", "rollback", "c2b", "--reason=good after all")
    assert "checkpoints/c2/step-1 | generation 2" in ask("registry", "list")
