"""Names and states of cache entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compile.cache import CacheEntry, CacheFile, EntryState, entry_state, parse_entry
from pipeline.core.manifest import MANIFEST_NAME
from tests.compile.cache_cases import VERSION, name_of

D, F, L, C, I = EntryState  # noqa: E741


@pytest.mark.parametrize("graph", ["model.hlo_module.pb", "model.hlo.pb"], ids=["new", "old"])
@pytest.mark.parametrize(
    ("neff", "done", "log", "lock", "expected"),
    [
        (1, 1, 0, 0, D),
        (1, 1, 1, 0, D),  # compiled in the end, with --retry_failed_compilation
        (1, 1, 0, 1, D),  # the lock was left over
        (1, 1, 1, 1, D),
        (0, 0, 1, 0, F),
        (1, 0, 1, 0, F),
        (0, 0, 0, 1, L),
        (0, 0, 1, 1, L),  # a failure that is tried again
        (1, 0, 0, 1, L),
        (1, 0, 1, 1, L),
        (0, 1, 0, 1, L),
        (0, 1, 1, 1, L),
        (0, 0, 0, 0, C),
        (1, 0, 0, 0, I),
        (0, 1, 0, 0, I),
        (0, 1, 1, 0, I),
    ],
)
def test_state_of_every_combination(
    graph: str, neff: int, done: int, log: int, lock: int, expected: EntryState
) -> None:
    present = {"model.neff": neff, "model.done": done, "model.log": log, f"{graph}.lock": lock}
    names = {graph, "compile_flags.json", *(name for name, is_there in present.items() if is_there)}
    assert entry_state(names) is expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (set(), I),
        ({"compile_flags.json"}, I),
        ({"model.neff", "model.done"}, D),
        ({"model.log"}, F),
        ({"model.hlo.pb.lock"}, L),
    ],
)
def test_state_without_a_graph(names: set[str], expected: EntryState) -> None:
    assert entry_state(names) is expected


def test_parts_of_a_name() -> None:
    name = parse_entry("neuronxcc-2.24.8799.0+6f62ff7c/MODULE_18108742649528384371+839ddec0")
    assert name is not None
    assert (name.version, name.flags) == ("2.24.8799.0", "839ddec0")
    assert name.is_of({"2.24.8799.0"}) and name.is_of({name.version_dir}) and name.is_of(["2.24.8799.0+6f62ff7c"])
    assert not name.is_of({"2.24"}) and not name.is_of(())


@pytest.mark.parametrize(
    "key",
    [
        "neuronxcc-2.24.8799.0+6f62ff7c/MODULE_0a1b2c3d4e5f60718293+e30acd3a",  # of torch_neuronx.trace
        "neuronxcc-2.9.0/MODULE_1+d41d8cd9",
    ],
)
def test_names_that_are_entries(key: str) -> None:
    name = parse_entry(key)
    assert name is not None
    assert name.key == key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "neuronxcc-2.24.8799.0+6f62ff7c",
        "neuronxcc-2.24.8799.0+6f62ff7c/",
        "neuronxcc-2.24.8799.0+6f62ff7c/MODULE_1",
        "neuronxcc-2.24.8799.0+6f62ff7c/MODULE_1+e30acd3",
        "neuronxcc-2.24.8799.0+6f62ff7c/MODULE_1+E30ACD3A",
        "neuronxcc-2.24.8799.0+6f62ff7c/MODULE_1+e30acd3a/model.neff",
        "neuronxcc-2.24.8799.0+6f62ff7c/.trnpipe-tmp-0123",
        "neuronxcc/MODULE_1+e30acd3a",
        "xla-2.9.0+cpu/MODULE_1+d41d8cd9",
        ".trnpipe-sync/MODULE_1+e30acd3a",
        "a/neuronxcc-2.24/MODULE_1+e30acd3a",
    ],
)
def test_names_that_are_not_entries(key: str) -> None:
    assert parse_entry(key) is None


@given(st.text(max_size=60))
def test_any_text_is_an_entry_of_that_name_or_none(text: str) -> None:
    name = parse_entry(text)
    assert name is None or name.key == text


@given(graph=st.integers(min_value=0), flags=st.integers(0, 2**32 - 1), parts=st.tuples(*[st.integers(0, 99999)] * 3))
def test_names_survive(graph: int, flags: int, parts: tuple[int, ...]) -> None:
    key = f"neuronxcc-{'.'.join(map(str, parts))}+abc/MODULE_{graph}+{flags:08x}"
    name = parse_entry(key)
    assert name is not None
    assert (name.key, name.flags) == (key, f"{flags:08x}")


def test_ages_sizes_and_locks() -> None:
    files = (CacheFile("model.hlo_module.pb", 10, 100.0), CacheFile("model.hlo_module.pb.lock", 0, 130.0))
    entry = CacheEntry(name_of(1), files)
    assert (entry.size_bytes, entry.age_s(150.0), entry.state) == (10, 20.0, L)
    assert entry.is_lock_older(150.0, 19.0) and not entry.is_lock_older(150.0, 20.0)
    assert entry.without_locks().state is C
    assert not entry.without_locks().is_lock_older(1e9, 0.0), "no lock is not an old lock"
    unknown = CacheEntry(name_of(1), (CacheFile("model.hlo_module.pb.lock", 0),))
    assert unknown.age_s(150.0) is None and not unknown.is_lock_older(1e9, 0.0)


@pytest.mark.parametrize(
    ("marker_bytes", "expected"), [(None, I), (0, I), (300, D)], ids=["half uploaded", "withdrawn", "published"]
)
def test_state_of_an_entry_as_sync_publishes_it(marker_bytes: int | None, expected: EntryState) -> None:
    files = [CacheFile(f"{'0' * 32}/model.neff", 10)]
    files += [] if marker_bytes is None else [CacheFile(MANIFEST_NAME, marker_bytes)]
    entry = CacheEntry(name_of(1), tuple(files))
    assert entry.is_published and entry.state is expected
    assert VERSION in entry.name.key
