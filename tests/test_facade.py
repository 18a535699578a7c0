"""`import trnpipe`: cheap, and every name it promises is there."""

import subprocess
import sys

import pytest

import pipeline
import trnpipe


def test_importing_it_imports_neither_torch_nor_the_settings() -> None:
    code = "import sys, trnpipe; print(trnpipe.__version__, {'torch', 'pydantic', 'boto3'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [pipeline.__version__, "set()"]


@pytest.mark.parametrize("name", trnpipe.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(trnpipe, name) is not None
    assert name in dir(trnpipe)


def test_the_names_of_parallelism_are_these_ten() -> None:
    homes = trnpipe._HOME.items()
    found = {name for name, home in homes if home.startswith("pipeline.parallel.")}
    expected = {"Plan", "init", "layout", "transform", "delayed_init", "clip_grad_norm", "save", "load"}
    assert found == expected | {"Strategy", "Environment"}


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Setings'"):
        trnpipe.Setings  # noqa: B018
