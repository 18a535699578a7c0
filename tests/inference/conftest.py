"""A workspace whose vectors are served, and an empty folder for caches."""

from pathlib import Path

import pyarrow as pa
import pytest

from pipeline import cli
from pipeline.io.storage import Storage, open_storage
from tests.embed.catalogues import products, write_catalogue
from tests.embed.checkpoints import make_checkpoint


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """A workspace with 100 products in three parts, embedded by two models one after the other, and served."""
    folder = tmp_path_factory.mktemp("served")
    storage = open_storage(str(folder / "workspace"))
    twice = pa.table({"product_id": ["p3", "p100"], "title": ["another title", "camera\x1b[31m model 7"]})
    write_catalogue(folder / "in", [products(range(60)), pa.concat_tables([products(range(60, 100)), twice])])
    for cycle, seed in (("c0", 1), ("c1", 2)):
        make_checkpoint(storage, folder, cycle, seed)
        for action in ([], ["verify"]):
            flags = [f"--workspace={folder}/workspace", f"--cycle={cycle}", "--backend=cpu", "--data.num-workers=1"]
            flags += [f"--embed.catalogue.path={folder}/in", "--embed.output.rows-per-part=45"]
            flags += ["--embed.catalogue.max-bad-fraction=0.1"]
            assert cli.main(["embed", *action, *flags]) == 0
    return storage


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"
