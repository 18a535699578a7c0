"""Every check passes on what was committed, and fails on what is wrong."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.manifest import FileRecord, Manifest
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer
from pipeline.embed.digest import VerifyCheck
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.vectors import VectorSet, find_vectors
from pipeline.embed.verify import (
    check_catalogue,
    check_files,
    check_numbers,
    check_result,
    check_sample,
    check_unique,
    run_check,
)
from pipeline.io.commit import hash_bytes
from pipeline.io.storage import open_storage
from tests.embed.catalogues import (
    MAX_TOKENS,
    Case,
    HashEmbedder,
    inline,
    products,
    title,
    tokenizer_json,
    write_catalogue,
)

STOP = StopSignal()
PART = "part-00001.parquet"
SWAPPED = pa.array([1, 0, *range(2, 20)])


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """p0 to p99, with p7 twice and a row without a title."""
    case = Case(tmp_path, {"dtype": "fp16"})
    odd = pa.table({"product_id": ["p7", "px"], "title": ["phone", None]})
    case.embed(write_catalogue(tmp_path / "in", [products(range(80)), odd, products(range(80, 100))]))
    return case


def vectors_of(case: Case) -> VectorSet:
    return find_vectors(case.workspace, "c1")


def plan_of(case: Case) -> EmbedPlan:
    return case.plan(case.folder / "in")


def catalogue_check(case: Case) -> tuple[VerifyCheck, list[Any]]:
    plan = plan_of(case)
    with mock.patch("pipeline.embed.verify.run_tasks", inline):
        return check_catalogue(vectors_of(case), plan, open_storage(plan.catalogue.root), STOP, num_workers=1)


def sample_check(case: Case) -> VerifyCheck:
    tokenizer, picked = TextTokenizer(tokenizer_json()), catalogue_check(case)[1]
    return check_sample(vectors_of(case), picked, tokenizer, HashEmbedder().stream, prefix="", max_tokens=MAX_TOKENS)


def change(case: Case, how: Callable[[pa.Table], pa.Table], name: str = PART) -> None:
    """Write a part again, and a manifest that fits it: what a wrong writer would leave."""
    key = f"embeddings/c1/{name}"
    sink = io.BytesIO()
    pq.write_table(how(pq.read_table(io.BytesIO(case.workspace.read_bytes(key)))), sink, compression="none")
    case.workspace.write_bytes(key, sink.getvalue())
    manifest = vectors_of(case).manifest
    record = FileRecord(size_bytes=len(sink.getvalue()), xxh3_128=hash_bytes(sink.getvalue()))
    altered = Manifest(
        kind=manifest.kind, created_by="test", fields=manifest.fields, files=manifest.files | {name: record}
    )
    case.workspace.write_bytes("embeddings/c1/MANIFEST.json", altered.to_json())


def with_vectors(change_values: Callable[[Any], None]) -> Callable[[pa.Table], pa.Table]:
    def how(table: pa.Table) -> pa.Table:
        values = table["vector"].combine_chunks().flatten().to_numpy().reshape(len(table), -1).copy()
        change_values(values)
        vectors = pa.FixedSizeListArray.from_arrays(
            pa.array(values.reshape(-1)), type=table.schema.field("vector").type
        )
        return table.set_column(1, table.schema.field("vector"), vectors)

    return how


def assign(row: Any, value: Any) -> Callable[[pa.Table], pa.Table]:
    def how(values: Any) -> None:
        values[row] = value

    return with_vectors(how)


def checks_of(case: Case) -> dict[str, VerifyCheck]:
    vectors = vectors_of(case)
    return {
        "files": run_check("files", lambda: check_files(vectors)),
        "numbers": run_check("numbers", lambda: check_numbers(vectors, STOP)),
        "unique": run_check("unique", lambda: check_unique(vectors, STOP)),
        "catalogue": run_check("catalogue", lambda: catalogue_check(case)[0]),
        "sample": run_check("sample", lambda: sample_check(case)),
    }


def failures_of(case: Case) -> dict[str, str]:
    """What each check that fails says of the vectors."""
    return {name: check.seen for name, check in checks_of(case).items() if check.outcome == "fail"}


@pytest.mark.stage
def test_all_is_well(case: Case) -> None:
    checks = checks_of(case)
    assert {check.outcome for check in checks.values()} == {"pass"}, [check.line() for check in checks.values()]
    assert "100 ids with their texts and 2 bad rows" in checks["catalogue"].seen
    assert checks["sample"].figures["min_cosine"] == pytest.approx(1.0, abs=1e-3)
    write_catalogue(case.folder / "in", [products(range(81))])
    assert "was changed after" in failures_of(case)["catalogue"]


def roll(values: Any) -> None:
    values[:] = np.roll(values, 1, axis=0)


def permute(values: Any) -> None:
    values[:] = values[:, ::-1]


def swap_ids(table: pa.Table) -> pa.Table:
    """Of two rows, with their hashes."""
    for name in ("id", "id_hash"):
        place, values = table.schema.get_field_index(name), table[name].take(SWAPPED)
        table = table.set_column(place, table.schema.field(name), values)
    return table


def as_fp32(table: pa.Table) -> pa.Table:
    values = table["vector"].combine_chunks().flatten().cast(pa.float32())
    vectors = pa.FixedSizeListArray.from_arrays(values, 16)
    return table.set_column(1, pa.field("vector", vectors.type, nullable=False), vectors)


def without_ids(table: pa.Table) -> pa.Table:
    return table.set_column(0, "id", pa.array([None, *table["id"].to_pylist()[1:]], pa.string()))


@pytest.mark.stage
@pytest.mark.parametrize(
    ("how", "by"),
    [
        (assign((3, 5), np.nan), {"numbers"}),
        (assign((3, 5), -np.inf), {"numbers"}),
        (assign(3, 0.0), {"numbers"}),
        (assign((slice(None), slice(None)), 0.25), {"sample"}),
        (swap_ids, {"catalogue"}),
        (lambda table: table.set_column(0, table.schema.field(0), table["id"].take(SWAPPED)), {"numbers"}),
        (lambda table: table.drop_columns(["id_hash"]), {"numbers", "unique", "catalogue"}),
        (without_ids, {"numbers"}),
        (lambda table: table.take(pa.array([*range(19), 0])), {"unique", "catalogue"}),
        (lambda table: table.slice(0, 19), {"numbers", "catalogue"}),
        (lambda table: table.slice(0, 0), {"numbers", "catalogue"}),
        (as_fp32, {"numbers"}),
        (with_vectors(permute), {"sample"}),
        (with_vectors(roll), {"sample"}),
        (with_vectors(lambda values: np.negative(values, out=values)), {"sample"}),
        (with_vectors(lambda values: np.multiply(values, 1.1, out=values)), {"numbers"}),
        (lambda table: table.drop_columns(["text_hash"]), {"numbers", "catalogue"}),
        (lambda table: table.replace_schema_metadata({"trnpipe.plan": "x"}), {"numbers"}),
        (lambda table: table.set_column(3, table.schema.field(3), pa.array(range(20), pa.uint64())), {"catalogue"}),
        (lambda table: table.set_column(2, table.schema.field(2), pa.array(range(20), pa.uint64())), {"catalogue"}),
    ],
)
def test_every_kind_of_bad_vector_is_found(case: Case, how: Callable[[pa.Table], pa.Table], by: set[str]) -> None:
    change(case, how)
    found = failures_of(case)
    assert by <= found.keys() and "files" not in found


def test_vectors_that_are_all_the_same_are_found_also_without_a_sample(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.embed(write_catalogue(tmp_path / "in", [products(range(40))]))
    for name in ("part-00000.parquet", PART):
        assert check_numbers(vectors_of(case), STOP).outcome == "pass"
        change(case, assign((slice(None), slice(None)), 0.25), name)
    check = check_numbers(vectors_of(case), STOP)
    assert check.outcome == "fail" and "all 40 vectors are equal" in check.seen
    alike = Case(tmp_path / "alike")
    twice = pa.table({"product_id": ["a", "b"], "title": ["phone", "phone"]})
    alike.embed(write_catalogue(tmp_path / "alike" / "in", [twice]))
    assert check_numbers(vectors_of(alike), STOP).outcome == "pass"


def saved(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize(
    "how",
    [
        lambda array: saved(array.astype(np.float32)),
        lambda array: saved(np.asfortranarray(array)),
        lambda array: saved(array[:-1]),
        lambda array: saved(np.concatenate([array, array[:1]])),
        lambda array: saved(array[:, :8]),
        lambda array: saved(array)[:-32],
        lambda array: saved(array)[:100],
        lambda array: saved(array.astype(object)),
        lambda array: b"",
    ],
)
def test_a_matrix_that_is_not_what_its_ids_need_is_damaged(tmp_path: Path, how: Callable[[Any], bytes]) -> None:
    case = Case(tmp_path, {"format": "npy", "dtype": "fp16"})
    case.embed(write_catalogue(tmp_path / "in", [products(range(40))]))
    assert not failures_of(case)
    key = "embeddings/c1/part-00001.npy"
    case.workspace.write_bytes(key, how(np.load(io.BytesIO(case.workspace.read_bytes(key)))))
    found = failures_of(case)
    assert {"files", "numbers"} <= found.keys() and "part-00001" in found["numbers"]


def test_figures_are_of_the_worst_vector_and_the_sum_of_the_parts(case: Case) -> None:
    change(case, assign((0, slice(None)), 0.0), "part-00000.parquet")
    check = check_numbers(vectors_of(case), STOP)
    assert check.figures["max_norm_distance"] == 1.0
    vectors = vectors_of(case)
    fields = vectors.info.model_copy(update={"rows": 99}).model_dump(mode="json")
    other = VectorSet(case.workspace, vectors.prefix, vectors.manifest.model_copy(update={"fields": fields}))
    assert "the parts have 100 rows, but the manifest has 99" in check_numbers(other, STOP).seen


def test_an_id_in_two_parts(case: Case) -> None:
    first = pq.read_table(io.BytesIO(case.workspace.read_bytes("embeddings/c1/part-00000.parquet")))
    change(case, lambda table: pa.concat_tables([table.slice(0, 19), first.slice(0, 1).cast(table.schema)]))
    assert "1 ids of part-00001.parquet are duplicates, such as 'p0'" in failures_of(case)["unique"]


def test_an_id_twice_in_one_part_is_held_against_its_first_text(tmp_path: Path) -> None:
    case = Case(tmp_path, {"dtype": "fp16"})
    again = pa.table({"product_id": ["p3"], "title": ["blue drill with charger"]})
    case.embed(write_catalogue(tmp_path / "in", [pa.concat_tables([products(range(25)), again])]))
    check, picked = catalogue_check(case)
    assert check.outcome == "pass", check.seen
    assert sorted(one.text for one in picked) == sorted(title(number) for number in range(25))
    assert sample_check(case).outcome == "pass"


def test_many_problems_are_told_in_short() -> None:
    check = check_result("x", [f"problem {n}" for n in range(9)], "fine")
    assert check.seen == "problem 0; problem 1; problem 2; and 6 more"
    assert check.line() == "fail     x          problem 0; problem 1; problem 2; and 6 more"
