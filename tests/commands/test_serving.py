"""`trnpipe serving` and the rollback of a pair, as they are typed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.core.errors import ConfigError
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.model import Registry
from pipeline.registry.records import Author
from pipeline.registry.serving import serve_verified_pair
from tests.registry.cases import make_checkpoint
from tests.registry.test_serving import embedded, in_production

Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    """Two cycles that were served."""
    storage = open_storage(str(tmp_path / "ws"))
    for number, cycle in enumerate(("c1", "c2"), 1):
        place = make_checkpoint(storage, tmp_path, cycle)
        in_production(storage, place)
        serve_verified_pair(storage, embedded(storage, tmp_path, cycle, place, 2 * number))
    return storage


@pytest.fixture
def ask(workspace: Storage, capsys: pytest.CaptureFixture[str]) -> Ask:
    def asked(*words: str) -> tuple[int, str]:
        code = cli.main([*words, "--workspace", workspace.root.removeprefix("file://")])
        said = capsys.readouterr()
        return code, said.out + said.err

    return asked


def test_show(ask: Ask) -> None:
    code, text = ask("serving", "show")
    assert code == 0
    assert "served is checkpoints/c2/step-1 with 1 vectors of cycle c2 | generation 2" in text
    assert "before: served is checkpoints/c1/step-1" in text
    found = json.loads(ask("serving", "show", "--json")[1])
    assert found["serving"]["vectors"]["cycle"] == "c2"
    assert [pair["generation"] for pair in found["pairs"]] == [1, 2]
    code, text = ask("serving", "show", "--model-name=other")
    assert code == 78 and "one of relevance" in text
    assert "served is checkpoints/c2/step-1" in ask("registry", "show")[1]


def test_both_roll_back_together(ask: Ask) -> None:
    code, text = ask("registry", "rollback", "--reason=bad")
    assert (code, "rolled back to checkpoints/c1/step-1" in text, "vectors of cycle c1" in text) == (0, True, True)


def test_vectors_roll_back_alone(workspace: Storage, tmp_path: Path, ask: Ask) -> None:
    serve_verified_pair(workspace, embedded(workspace, tmp_path, "c2b", "checkpoints/c2/step-1", 5))
    code, text = ask("serving", "rollback", "--reason=a part was empty")
    assert (code, "vectors of cycle c2 " in text, "a part was empty" in text) == (0, True, True)
    registry = Registry(workspace, author=Author(by="carol", code_version="1"))
    assert registry.rollback_vectors("c2b", reason="good after all").vectors.cycle == "c2b"
    with pytest.raises(ConfigError, match="no reason is given"):
        registry.rollback_vectors("c2", reason="")
    assert [pair.vectors.cycle for pair in registry.pairs()] == ["c1", "c2", "c2b", "c2", "c2b"]
    assert "by carol" in ask("serving", "show")[1]
    assert "checkpoints/c2/step-1 | generation 2" in ask("registry", "list")[1]


@pytest.mark.parametrize(
    "words",
    [
        ("serving", "rollback"),
        ("serving", "rollback", "c9", "--reason=x"),
        ("serving", "rollback", "--reason=x", "--json"),
        ("serving", "show", "--reason=x"),
        ("serving", "rollback", "--reason=x", "--model-name=other"),
        ("registry", "promote", "checkpoints/c1/step-1", "--without-vectors"),
    ],
)
def test_what_cannot_be(ask: Ask, words: tuple[str, ...]) -> None:
    code, text = ask(*words)
    assert (code, "Traceback" in text) == (78, False)
