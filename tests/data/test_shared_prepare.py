"""prepare() by several workers: the bytes of one alone, whatever they are and however often they are killed."""

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.data import shared_prepare, shared_survey, survey
from pipeline.data.config import CategoricalFeature, DataConfig, SyntheticConfig, TokenizerConfig
from pipeline.data.prepare import PreparedData
from pipeline.data.shared_prepare import prepare_share
from pipeline.data.shared_survey import SharedSurvey, share_files
from pipeline.data.sources import open_source
from pipeline.data.synthetic import generate, partitions
from pipeline.io.storage import TEMP_PREFIX
from tests.data.conftest import Workplace

Make = Callable[[str], Any]
Whole = tuple[PreparedData, dict[str, bytes]]
SYNTHETIC = SyntheticConfig(num_queries=60, num_days=2)
CONFIG = DataConfig(
    rows_per_chunk=100,
    num_workers=1,
    numeric=("price",),
    categorical=(CategoricalFeature(column="brand", num_ids=64),),
    slices=("brand",),
    tokenizer=TokenizerConfig(vocab_size=600),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days in three files each (Parquet, JSON lines, one that is empty), with bad rows, blank lines, a gap.

    Splits cut through queries.
    """
    folder = tmp_path_factory.mktemp("input")
    for name in partitions(SYNTHETIC):
        table = pa.Table.from_batches(generate(SYNTHETIC, name))
        splits = ["test" if number % 9 == 0 else "train" for number in range(len(table))]
        table = table.append_column("split", pa.array(splits))
        (folder / name).mkdir()
        first, second = table.slice(0, 430), table.slice(430)
        pq.write_table(first, folder / name / "part-0.parquet", row_group_size=90)
        pq.write_table(table.slice(0, 0), folder / name / "part-1.parquet")
        lines = [json.dumps(row) for row in second.to_pylist()]
        lines[7:7] = ["", '{"query": "no title", "label": "exact", "brand": "x", "price": 1}', "{torn"]
        (folder / name / "part-2.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """What one alone prepares, in a worker of the product."""
    alone = Workplace(tmp_path_factory.mktemp("alone"))
    return alone.prepare(CONFIG.model_copy(update={"path": str(data)})), tokens_of(alone)


def bytes_below(folder: Path) -> dict[str, bytes]:
    """All files of the token sets and tokenizers."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tokens_of(place: Any) -> dict[str, bytes]:
    return {
        name: data
        for name, data in bytes_below(place.folder / "workspace" / "tokens").items()
        # What stays of the survey, and of a file that a worker was killed in; nobody reads either.
        if not name.endswith("/labels.json") and TEMP_PREFIX not in name
    }


def work(place: Any, config: DataConfig, worker: int, workers: int) -> PreparedData | int:
    return prepare_share(
        config,
        place.storage,
        worker=worker,
        workers=workers,
        scratch=place.folder / "scratch",
        events=place.emit,
        stop=place.stop,
    )


@pytest.mark.stage
@pytest.mark.parametrize("workers", [2, pytest.param(5, marks=pytest.mark.thorough), 23])
def test_bytes_are_those_of_one_alone(workplace: Make, data: Path, whole: Whole, workers: int) -> None:
    config, shared, (expected, tokens) = CONFIG.model_copy(update={"path": str(data)}), workplace("shared"), whole
    order = random.Random(workers).sample(range(workers), workers)
    results = [work(shared, config, worker, workers) for worker in order]
    assert all(isinstance(result, int) and result > 0 for result in results[:-1])
    assert results[-1] == expected
    assert expected.rows_bad == 4 and expected.rows_blank == 2
    assert all(info.judged["test"].queries_in_train > 10 for info in expected.infos)
    assert tokens_of(shared) == tokens
    assert not (shared.folder / "scratch" / "prepare" / f"worker-{order[-1]}").exists()
    late = work(shared, config, 0, workers)
    assert late == replace(expected, prepared=0, rows_prepared=0, reused=2)
    assert tokens_of(shared) == tokens


@pytest.mark.stage
def test_another_number_of_workers_goes_on_where_the_last_ones_stopped(
    workplace: Make, data: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shared, (expected, tokens) = CONFIG.model_copy(update={"path": str(data)}), workplace("shared"), whole
    for worker in (1, 3):
        assert isinstance(work(shared, config, worker, 5), int)
    published: list[str] = []
    publish = shared_prepare._Parts.publish

    def noted(parts: Any, staging: Any, name: str, files: Any) -> None:
        published.append(f"{parts.named.partition.name}/{name}")
        publish(parts, staging, name, files)

    there = {path.stem for path in (shared.folder / "workspace/tokens/catalogue/share").rglob("*.safetensors")}
    assert there
    monkeypatch.setattr(shared_prepare._Parts, "publish", noted)
    assert isinstance(work(shared, config, 1, 2), int)
    assert work(shared, config, 0, 2) == expected
    assert len(published) == len(set(published)) < sum("/train-" in name for name in tokens)
    assert tokens_of(shared) == tokens


SCRIPT = """
import signal, sys
from pathlib import Path
from pipeline.core.errors import exit_code_of
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.shared_prepare import prepare_share
from pipeline.io.storage import open_storage
stop = StopSignal()
signal.signal(signal.SIGTERM, lambda *_: stop.set("SIGTERM"))
folder, worker, workers = Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
try:
    prepare_share(DataConfig.model_validate_json(sys.argv[2]), open_storage(str(folder / "workspace"), stop=stop),
                  worker=worker, workers=workers, scratch=folder / f"scratch-{worker}",
                  events=lambda name, **fields: None, stop=stop)
except Exception as error:
    print(error, file=sys.stderr)
    sys.exit(exit_code_of(error))
"""


@pytest.mark.fault
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 5))])
def test_workers_at_once_killed_at_random_and_started_again(
    workplace: Make, data: Path, whole: Whole, workers: int
) -> None:
    """Each is killed once, by SIGKILL or SIGTERM, at a time that chance chooses; then all are run to their end."""
    config = CONFIG.model_copy(update={"path": str(data)})
    shared, chance, (expected, tokens) = workplace("shared"), random.Random(workers), whole

    def start(worker: int) -> subprocess.Popen[bytes]:
        words = [str(shared.folder), config.model_dump_json(), str(worker), str(workers)]
        return subprocess.Popen([sys.executable, "-c", SCRIPT, *words], stderr=subprocess.PIPE)

    children = [start(worker) for worker in range(workers)]
    try:
        for child in chance.sample(children, workers):
            try:
                child.wait(chance.uniform(0.5, 2.5))
            except subprocess.TimeoutExpired:
                child.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
            child.wait()
        children += (again := [start(worker) for worker in range(workers)])
        for worker, child in enumerate(again):
            _, said = child.communicate(timeout=240)
            if child.returncode == TransientError.exit_code:  # another one was done, and tidied up what it was reading
                children.append(child := start(worker))
                _, said = child.communicate(timeout=240)
            assert child.returncode == 0, said.decode()
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert tokens_of(shared) == tokens
    assert shared.prepare(config) == type(expected)(
        **{**vars(expected), "prepared": 0, "rows_prepared": 0, "reused": 2}
    )


@pytest.mark.stage
def test_a_new_day_is_shared_by_all_workers(workplace: Make) -> None:
    alone, shared = workplace("alone"), workplace("shared")
    days = [
        CONFIG.model_copy(update={"path": None, "synthetic": SYNTHETIC.model_copy(update={"num_days": n})})
        for n in (1, 2)
    ]
    for one in days:
        alone.prepare(one)
    work(shared, days[0], 1, 2)
    work(shared, days[0], 0, 2)
    assert isinstance(work(shared, days[1], 0, 2), int)
    again = work(shared, days[1], 1, 2)
    assert isinstance(again, PreparedData) and (again.prepared, again.reused) == (1, 1)
    assert tokens_of(shared) == tokens_of(alone)


@pytest.mark.stage
def test_a_day_that_comes_while_a_worker_is_at_work(
    workplace: Make, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries again, and shares the new input with those that started later: no day belongs to nobody."""
    alone, shared, folder = workplace("alone"), workplace("shared"), tmp_path / "in"
    first, second = partitions(SYNTHETIC)
    shutil.copytree(data / second, folder / second)
    config = CONFIG.model_copy(update={"path": str(folder), "labels": ("irrelevant", "exact"), "max_bad_fraction": 1.0})
    tokenizer = TokenizerConfig(path=str(tmp_path / "tokenizer.json"))
    made = alone.prepare(CONFIG.model_copy(update={"path": str(data)})).tokenizer_prefix
    shutil.copy(alone.folder / "workspace" / made / "tokenizer.json", tmp_path)
    config = config.model_copy(update={"tokenizer": tokenizer})
    encode = shared_prepare._encode

    def day_comes(*arguments: Any) -> None:
        encode(*arguments)
        shutil.copytree(data / first, folder / first)

    with monkeypatch.context() as patch:
        patch.setattr(shared_prepare, "_encode", day_comes)
        with pytest.raises(TransientError, match="has changed since worker 0 of 2 looked at it"):
            work(shared, config, 0, 2)
    assert isinstance(work(shared, config, 1, 2), int)
    result = work(shared, config, 0, 2)
    assert isinstance(result, PreparedData)
    fresh = workplace("fresh")
    assert result.token_set_prefixes == fresh.prepare(config).token_set_prefixes
    assert tokens_of(shared).items() >= tokens_of(fresh).items()


@pytest.mark.stage
def test_too_many_bad_rows_end_whoever_would_commit(workplace: Make, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows = [f"q {n},{'' if n % 3 else 'title'},yes" for n in range(400)]
    (tmp_path / "in" / "a.csv").write_text("\n".join(["query,title,label", *rows]) + "\n")
    config = CONFIG.model_copy(
        update={"path": str(tmp_path / "in"), "numeric": (), "categorical": (), "slices": (), "labels": ("no", "yes")}
    )
    place = workplace("shared")
    assert work(place, config, 0, 2) == 1
    with pytest.raises(DataError, match=r"flat: 266 of 400 rows are bad \(66.5%\): empty title"):
        work(place, config, 1, 2)
    work_again = config.model_copy(update={"max_bad_fraction": 1.0})
    assert isinstance(work(place, work_again, 1, 2), PreparedData), "what was encoded is not lost"


@pytest.mark.stage
def test_a_damaged_part_is_named(workplace: Make, data: Path) -> None:
    config, place = CONFIG.model_copy(update={"path": str(data)}), workplace("shared")
    work(place, config, 0, 2)
    part = next((place.folder / "workspace/tokens/catalogue/share").rglob("*.safetensors"))
    part.write_bytes(b"torn")
    with pytest.raises(DataError, match=f"{part.name} is no part of a partition"):
        work(place, config, 1, 2)


@pytest.mark.stage
def test_parts_that_a_killed_commit_left_do_not_outlive_what_they_prove(
    workplace: Make, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, place = CONFIG.model_copy(update={"path": str(data)}), workplace("shared")
    left = place.folder / "workspace/tokens/catalogue/share"
    with monkeypatch.context() as patch:  # killed between its commit and taking the parts away
        patch.setattr(type(place.storage), "delete_prefix", lambda *args: None)
        work(place, config, 0, 1)
    assert list(left.rglob("*.safetensors"))
    assert isinstance(work(place, config, 0, 1), PreparedData)
    assert not list(left.rglob("*.safetensors"))


@pytest.mark.stage
def test_workers_that_have_all_parts_at_once(
    workplace: Make, data: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one commits, and deletes the parts, when this one has found all of them there."""
    config = CONFIG.model_copy(update={"path": str(data)})
    shared, (expected, tokens), others = workplace("shared"), whole, list[PreparedData | int]()
    work(shared, config, 0, 2)
    read_parts = shared_prepare._read_parts

    def too_late(*arguments: Any) -> Any:
        monkeypatch.setattr(shared_prepare, "_read_parts", read_parts)
        others.append(work(shared, config, 1, 2))
        return read_parts(*arguments)

    monkeypatch.setattr(shared_prepare, "_read_parts", too_late)
    assert work(shared, config, 1, 2) == expected
    assert others == [expected]
    assert tokens_of(shared) == tokens


@pytest.mark.unit
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 40), st.integers(0, 12))
def test_every_chunk_has_one_worker(sizes: list[int], workers: int, num_chunks: int) -> None:
    shares = [share_files(sizes, worker, workers) for worker in range(workers)]
    for number in range(len(sizes)):
        of_file = [one[number] for one in shares if number in one]
        assert sorted(chunk for one in of_file for chunk in one.chunks(num_chunks)) == list(range(num_chunks))
        assert all(one.has(chunk) for one in of_file for chunk in one.chunks(num_chunks))
        assert sum(one.place == 0 for one in of_file) == 1


@pytest.mark.stage
@pytest.mark.parametrize(("rows", "size_bytes"), [(10_000, 2**27), (150, 2**27), (10_000, 3000), (1, 1)])
def test_the_survey_is_that_of_one_alone(
    workplace: Make, data: Path, monkeypatch: pytest.MonkeyPatch, rows: int, size_bytes: int
) -> None:
    """Also where one file is much denser than the others, and was thinned too much."""
    monkeypatch.setattr(survey, "SAMPLE_BYTES", size_bytes)
    tokenizer = TokenizerConfig.model_construct(**{**vars(CONFIG.tokenizer), "train_rows": rows})
    config, place = CONFIG.model_copy(update={"path": str(data), "tokenizer": tokenizer}), workplace("one")
    source = open_source(config, scratch=place.folder, stop=StopSignal())
    alone = survey.survey(source, config, want_labels=True, want_sample=True, stop=StopSignal())
    looks = [SharedSurvey(source, config, place.storage, worker, 3, StopSignal()) for worker in range(3)]
    looked = list[str]()
    survey_file = survey.survey_file

    def noted(source: Any, config: Any, file: Any, *rest: Any) -> Any:
        looked.append(file.key)
        return survey_file(source, config, file, *rest)

    monkeypatch.setattr(shared_survey, "survey_file", noted)
    for look in looks:
        look._look(f"{look._prefix}/texts", True, True)
    assert len(looked) == len(set(looked)) == 6, "the first looks at all, as nobody else is there"
    for look in looks:
        found = look(True, True)
        assert found.labels == alone.labels and found.has_labels
        assert found.sample.held == alone.sample.held
        assert found.sample.stride == alone.sample.stride
    known = looks[0](True, False)
    assert known.labels == alone.labels and list(known.labels) == list(alone.labels)


@pytest.mark.stage
def test_a_survey_that_another_worker_tidied_up_is_tried_again(
    workplace: Make, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = workplace("one")
    read = SharedSurvey._read

    def tidied(self: SharedSurvey, folder: str, number: int) -> Any:
        if number == 1:
            self.delete()
        return read(self, folder, number)

    with monkeypatch.context() as patch:
        patch.setattr(SharedSurvey, "_read", tidied)
        with pytest.raises(TransientError, match="which another worker deleted as it finished"):
            work(place, CONFIG.model_copy(update={"path": str(data)}), 0, 1)
    assert not isinstance(work(place, CONFIG.model_copy(update={"path": str(data)}), 0, 1), int)
