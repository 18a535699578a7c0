"""Files of weights: what is read, and what is refused by name. Nothing in a file is ever run."""

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.core.errors import CheckpointError
from pipeline.model.weights import load_tensors

GOOD = {"a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "a.bias": torch.tensor([0.1, -0.2])}


def saved(folder: Path, content: Any, name: str = "model.bin", *, as_zip: bool = True) -> Path:
    path = folder / name
    torch.save(content, path, _use_new_zipfile_serialization=as_zip)
    return path


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_tensors(path, "SOURCE")
    assert str(caught.value).startswith("SOURCE")
    return caught.value


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_tensors_come_back_bit_by_bit(tmp_path: Path, form: str) -> None:
    path = tmp_path / "w.safetensors"
    if form == "safetensors":
        save_file(GOOD, path)
    else:
        path = saved(tmp_path, OrderedDict(GOOD), as_zip=form == "zip")
    found = load_tensors(path, "x")
    assert found.keys() == GOOD.keys() and all(torch.equal(found[name], GOOD[name]) for name in GOOD)


def test_tensors_are_fp32_contiguous_and_in_memory_of_their_own(tmp_path: Path) -> None:
    matrix = torch.arange(6, dtype=torch.float16).reshape(2, 3)
    content = {
        "one": matrix,
        "tied": matrix,
        "turned": matrix.t(),
        "brain": torch.nn.Parameter(matrix.bfloat16()),
        "embeddings.position_ids": torch.arange(4),
    }
    found = load_tensors(saved(tmp_path, content), "x")
    assert found.keys() == content.keys() - {"embeddings.position_ids"}
    assert all(torch.equal(tensor, content[name].float()) for name, tensor in found.items())
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in found.values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 4


class Hostile:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle", "within"])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path, form: str) -> None:
    mark, path = tmp_path / "was-run", tmp_path / "model.bin"
    hostile = Hostile(mark)
    if form == "pickle":
        path.write_bytes(pickle.dumps({"a.weight": hostile}))
    elif form == "within":
        saved(tmp_path, {**GOOD, "z.weight": hostile})
    else:
        saved(tmp_path, hostile, as_zip=form == "zip")
    error = refusal(path)
    assert not mark.exists() and "no code was run" in error.seen
    if form != "pickle":
        assert "would run posix.system" in error.seen
    assert "weights_only" not in str(error), "no advice to load it after all"
    with path.open("rb") as file:  # it is as hostile as it claims
        torch.load(file, weights_only=False) if form != "pickle" else pickle.load(file)  # noqa: S301
    assert mark.exists()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ([GOOD["a.bias"]], "contains a list"),
        ({"state_dict": GOOD, "epoch": 3}, "contains 'state_dict', which is a dict"),
        ({"a.weight": GOOD["a.weight"], "epoch": 3}, "contains 'epoch', which is a int"),
        ({3: GOOD["a.bias"]}, "contains 3, which is a Tensor"),
        ({}, "contains no tensors"),
        ({"a": torch.tensor([1, 2])}, "a: torch.int64"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "a: torch.complex64"),
        ({"a": torch.tensor([0.0, float("nan")])}, "a: NaN or infinite"),
        ({"a": torch.tensor([float("-inf")])}, "a: NaN or infinite"),
        ({"a": torch.eye(3).to_sparse()}, "a: torch.sparse_coo"),
        ({"a": torch.ones(4).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"a": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}, "quantized"),
        ({"a": torch.zeros(3, device="meta")}, "a: torch.strided on meta"),
        ({"a": torch.zeros(1).expand(10**12)}, "share the same storage"),
        ({"a": torch.zeros(1).expand(1000)}, "a: shape [1000] over 4 bytes"),
    ],
)
def test_what_is_no_state_dict_is_refused_by_name(tmp_path: Path, content: Any, seen: str) -> None:
    assert seen in refusal(saved(tmp_path, content)).seen


def test_a_small_file_that_fills_the_memory_is_refused(tmp_path: Path) -> None:
    shared = torch.zeros(10_000)
    error = refusal(saved(tmp_path, {f"w{place}": shared for place in range(50)}))
    assert "share the same storage" in error.seen
    plain = saved(tmp_path, {"a": torch.zeros(1_000_000)}, "plain.bin")
    packed = tmp_path / "packed.bin"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert packed.stat().st_size < plain.stat().st_size / 100
    assert "compressed entry" in refusal(packed).seen


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["model.bin", "model.safetensors"])
def test_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".bin"):
        torch.save(GOOD, path)
    else:
        save_file(GOOD, path)
    whole = path.read_bytes()
    for cut in (0, 1, 7, 8, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refusal(path)
    for content in (b"\0" * 64, b"\xff" * 64, b'{"a": 1}', pickle.dumps(GOOD["a.bias"].tolist())):
        path.write_bytes(content)
        refusal(path)


def test_files_that_are_no_state_dict_are_refused(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    refusal(path)
    program = tmp_path / "model.pt"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), program)  # type: ignore[no-untyped-call]
    refusal(program)
