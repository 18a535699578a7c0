"""`trnpipe registry` as people and machines use it."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli, commands
from pipeline.checkpoint.store import WEIGHTS
from pipeline.commands import registry
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.promote import promote
from pipeline.registry.records import Place, StoredVerdict, pointer_key, store_verdict
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


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "ws"))


@pytest.fixture
def asked(workspace: Storage, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command on the workspace: exit code, stdout, stderr."""

    def ask(*words: str) -> tuple[int, str, str]:
        root = workspace.root.removeprefix("file://")
        code = cli.main(["registry", *words, "--workspace", root])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ask


@pytest.fixture
def family(workspace: Storage, tmp_path: Path) -> tuple[str, str, str]:
    """A root, which is in production, its child, and a grandchild."""
    root = make_checkpoint(workspace, tmp_path, "c1")
    child = make_checkpoint(workspace, tmp_path, "c2", **child_of(workspace, root))
    seen = {"partitions": {"dt=2026-01-01": "aa", "dt=2026-01-02": "bb"}, "watermark": "2026-01-02"}
    third = make_checkpoint(workspace, tmp_path, "c3", **child_of(workspace, child, **seen))
    put(workspace, root)
    return root, child, third


def judge(workspace: Storage, place: str, *, passes: bool = True, cycle: str = "") -> None:
    """What evaluate leaves behind, made against production as it is."""
    now = production(workspace)
    verdict = StoredVerdict(
        model=MODEL,
        cycle=cycle or place.split("/")[1],
        candidate=Place(checkpoint=place, digest=digest_of(workspace, place)),
        incumbent=now.place if now else None,
        promote=passes,
        reasons=("ndcg@10 +0.0120 [+0.0040, +0.0200]",) if passes else ("ndcg@10 -0.0300",),
        figures={"ndcg@10": 0.8},
        settings_hash="h",
        code_version="v",
        at=datetime.now(UTC),
    )
    store_verdict(workspace, verdict)


def test_the_command_line_offers_what_there_is() -> None:
    tool = commands.TOOLS["registry"]
    assert tool.actions.keys() == registry.FLAGS.keys()
    assert tool.switches | tool.options.keys() == frozenset().union(*registry.FLAGS.values())
    assert registry.VERBS.keys() == {"promoted", "forced", "rolled_back", "refused"}


def test_what_only_reads_finds_the_only_model(
    workspace: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_checkpoint(workspace, tmp_path, "c1")
    root = workspace.root.removeprefix("file://")

    def ask(*words: str) -> tuple[int, str]:
        code = cli.main([*words, "--workspace", root])
        said = capsys.readouterr()
        return code, said.out + said.err

    def put_as(model: str) -> None:
        promote(workspace, model, place, expected=None, decision=passed(workspace, place), author=AUTHOR)

    put_as("other")
    assert ask("registry", "show")[1].startswith(f"other | {place}")
    assert ask("serving", "show")[1].startswith("other | nothing is served")
    assert ask("registry", "rollback", "--reason", "x")[0] == 78, "what changes something needs the name"
    code, text = ask("registry", "show", "--model-name", "third")
    assert code == 78 and "has no model third" in text and "one of other" in text
    put_as("again")
    for words in (("registry", "show"), ("serving", "show"), ("export", "--out", f"{root}/out")):
        code, text = ask(*words)
        assert code == 78 and "one of again, other" in text


def test_an_empty_workspace(asked: Any) -> None:
    assert asked("list") == (0, "no models yet: trnpipe evaluate, or trnpipe registry promote CHECKPOINT\n", "")
    assert asked("list", "--json")[1] == "[]\n"
    assert asked("show") == (0, "relevance | nothing is in production\n", "")
    document = json.loads(asked("show", "--json")[1])
    assert (document["checkpoint"], document["lineage"], document["history"]) == (None, [], [])
    assert asked("rollback", "--reason", "x")[0] == 78


def test_list_and_show(asked: Any, workspace: Storage, family: tuple[str, str, str]) -> None:
    put(workspace, family[2], figures={"ndcg@10": 0.8})
    code, out, _ = asked("list")
    assert code == 0 and out.startswith(f"relevance | {family[2]} | generation 2 | promoted 20")
    assert out.endswith("by tester@host\n")
    (row,) = json.loads(asked("list", "--json")[1])
    assert (row["model"], row["production"]["checkpoint"]) == (MODEL, family[2])

    lines = asked("show")[1].splitlines()
    assert lines[1] == "lineage, back to the root:"
    assert [line.split(" | ")[0].strip() for line in lines[2:7:2]] == list(reversed(family))
    assert lines[2].endswith("data to 2026-01-02 | new dt=2026-01-02 | settings settings-c3 | code 1.0")
    assert lines[3] == "    valid_ndcg 0.5000"
    assert lines[7] == "history, the newest first:"
    assert f"promoted {family[2]} | by tester@host" in lines[8] and lines[9] == "    better"
    document = json.loads(asked("show", "--json")[1])
    assert document["in_production"] and document["production"]["generation"] == 2
    assert [ancestor["checkpoint"] for ancestor in document["lineage"]] == list(reversed(family))
    assert [entry["checkpoint"] for entry in document["history"]] == [family[0], family[2]]


@pytest.mark.fault
def test_a_lineage_that_is_lost_says_so(asked: Any, workspace: Storage, family: tuple[str, str, str]) -> None:
    workspace.delete_prefix(family[1])
    lines = asked("show", family[2])[1].splitlines()
    assert "seen dt=2026-01-01, dt=2026-01-02" in lines[2]
    assert lines[4].startswith(f"  {workspace.uri(family[1])} | ") and "the lineage ends here: it is gone" in lines[4]


def test_show_one_checkpoint_however_it_is_named(asked: Any, workspace: Storage, family: tuple[str, str, str]) -> None:
    path = workspace.local_path(family[1])
    names = (family[1], f"{family[1]}/", workspace.uri(family[1]), str(path))
    answers = {asked("show", name, "--json")[1] for name in names}
    assert len(answers) == 1
    document = json.loads(answers.pop())
    assert (document["checkpoint"], document["in_production"], document["history"]) == (family[1], False, [])
    assert len(document["lineage"]) == 2
    assert json.loads(asked("show", family[0], "--json")[1])["in_production"]


@pytest.mark.parametrize("name", ["s3://other/checkpoints/c1/step-1", "../x", "/etc", "checkpoints/c1/../../x"])
def test_a_checkpoint_elsewhere_is_refused(asked: Any, family: tuple[str, str, str], name: str) -> None:
    for action in (("show",), ("promote",), ("rollback", "--reason", "x")):
        code, _, err = asked(action[0], name, *action[1:])
        assert code == 78 and "Traceback" not in err


def test_promote_by_a_verdict(asked: Any, workspace: Storage, family: tuple[str, str, str]) -> None:
    judge(workspace, family[1])
    code, out, _ = asked("promote", family[1])
    assert code == 0
    assert out == f"relevance: promoted {family[1]}, in place of {family[0]} | every byte verified\n"
    pointer = consistent(workspace).pointer
    assert pointer is not None and pointer.figures == {"ndcg@10": 0.8}
    assert pointer.verdict == "cycles/c2/evaluate/verdict.json" and pointer.author.settings_hash
    assert "@" in pointer.author.by and pointer.reasons == ("ndcg@10 +0.0120 [+0.0040, +0.0200]",)
    code, out, _ = asked("promote", family[1])
    assert code == 0 and f"unchanged, production already is {family[1]}" in out
    assert consistent(workspace).pointer == pointer


def test_the_verdict_of_another_cycle_is_found_when_it_is_named(
    asked: Any, workspace: Storage, family: tuple[str, str, str]
) -> None:
    judge(workspace, family[1], cycle="again")
    assert asked("promote", family[1])[0] == 80
    assert asked("promote", family[1], "--cycle", "again")[0] == 0


def test_without_a_passing_verdict_it_is_refused_and_recorded(
    asked: Any, workspace: Storage, family: tuple[str, str, str]
) -> None:
    code, _, err = asked("promote", family[1])
    assert code == 80 and "no verdict of checkpoints/c2/step-1 is stored" in err
    assert "trnpipe evaluate --cycle c2" in err and "--force REASON" in err
    judge(workspace, family[1], passes=False)
    code, _, err = asked("promote", family[1])
    assert code == 80 and "ndcg@10 -0.0300" in err
    judge(workspace, family[1])
    put(workspace, family[2])
    code, _, err = asked("promote", family[1])
    assert (
        code == 80 and "judged against checkpoints/c1/step-1 in production, which is checkpoints/c3/step-1 now" in err
    )
    told = consistent(workspace)
    assert [action for action, _ in told.actions] == ["promoted", "refused", "refused", "promoted", "refused"]
    assert told.pointer is not None and told.pointer.checkpoint == family[2]
    assert f"refused {family[1]}" in asked("show")[1]


def test_force(asked: Any, workspace: Storage, family: tuple[str, str, str]) -> None:
    judge(workspace, family[1], passes=False)
    for empty in ("--force=", "--force= ", "--force"):
        assert asked("promote", family[1], empty)[0] == 78
    assert len(consistent(workspace).history) == 1
    code, out, _ = asked("promote", family[1], "--force", "the holdout is broken")
    assert code == 0 and f"promoted by force {family[1]}" in out
    pointer = consistent(workspace).pointer
    assert pointer is not None
    assert (pointer.action, pointer.reasons) == ("forced", ("forced: the holdout is broken", "ndcg@10 -0.0300"))


@pytest.mark.fault
def test_force_does_not_promote_what_is_damaged(asked: Any, workspace: Storage, family: tuple[str, str, str]) -> None:
    workspace.write_bytes(f"{family[1]}/{WEIGHTS}", b"other weights 1")
    code, _, err = asked("promote", family[1], "--force", "now")
    assert code == 74 and "model.safetensors" in err and "Traceback" not in err
    assert asked("promote", prefix("none"), "--force", "now")[0] == 74


def test_rollback(asked: Any, workspace: Storage, family: tuple[str, str, str]) -> None:
    put(workspace, family[1])
    put(workspace, family[2])
    code, _, err = asked("rollback")
    assert code == 78 and "no reason is given" in err
    code, out, _ = asked("rollback", "--reason", "clicks fell")
    assert (code, out) == (
        0,
        f"relevance: rolled back to {family[1]}, in place of {family[2]} | every byte verified\n",
    )
    assert asked("rollback", family[2], "--reason", "it was the index")[0] == 0
    code, out, _ = asked("rollback", family[2], "--reason", "again")
    assert code == 0 and "unchanged, production already is" in out
    actions = [action for action, _ in consistent(workspace).actions]
    assert actions == ["promoted"] * 3 + ["rolled_back"] * 2
    assert "clicks fell" in asked("show")[1]


@pytest.mark.parametrize(
    "words",
    [("list", "--force", "x"), ("show", "--reason", "x"), ("promote", "c", "--json"), ("rollback", "--force", "x")],
)
def test_a_flag_of_another_action_is_refused(asked: Any, words: tuple[str, ...]) -> None:
    code, _, err = asked(*words)
    assert code == 78 and "does not apply to trnpipe registry" in err


def test_other_models_have_their_own(asked: Any, workspace: Storage, family: tuple[str, str, str]) -> None:
    assert asked("promote", family[1], "--model-name", "second", "--force", "new")[0] == 0
    assert [row["model"] for row in json.loads(asked("list", "--json")[1])] == [MODEL, "second"]
    pointer = production(workspace)
    assert pointer is not None and pointer.checkpoint == family[0]


@pytest.mark.fault
def test_a_damaged_pointer_does_not_hide_other_models(
    asked: Any, workspace: Storage, family: tuple[str, str, str]
) -> None:
    workspace.write_bytes(pointer_key("second"), b"{}")
    code, out, _ = asked("list")
    assert code == 74 and f"relevance | {family[0]}" in out and "second | damaged" in out
    code, out, _ = asked("list", "--json")
    assert code == 74 and json.loads(out)[1]["model"] == "second"
    code, _, err = asked("show", "--model-name", "second")
    assert code == 74 and "is no pointer to a checkpoint" in err


@pytest.mark.fault
def test_production_that_is_gone_still_shows_the_way_back(
    asked: Any, workspace: Storage, family: tuple[str, str, str]
) -> None:
    put(workspace, family[1])
    workspace.delete_prefix(family[1])
    code, out, _ = asked("show")
    assert code == 74 and "damaged: " in out and f"promoted {family[0]}" in out
    assert asked("show", family[1])[0] == 74
    assert asked("rollback", "--reason", "it is gone")[0] == 0
