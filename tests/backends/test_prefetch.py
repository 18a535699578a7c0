"""Batches made ahead: nothing lost, errors surface, threads end."""

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest
import torch

from pipeline.backends import Batch, open_backend, prefetched
from pipeline.backends.cpu import CpuBackend
from pipeline.core.errors import ConfigError


def batch(number: int) -> Batch:
    return {"x": torch.tensor([number])}


def numbers(batches: Iterator[Batch]) -> list[int]:
    return [int(b["x"]) for b in batches]


def threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("total", [0, 1, 4, 23])
def test_all_in_order_and_the_end_is_the_end(depth: int, total: int) -> None:
    with prefetched((batch(i) for i in range(total)), depth) as ready:
        assert numbers(ready) == list(range(total))
        assert next(ready, None) is None
    assert threads() == 0


@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt()])
def test_an_error_comes_after_the_good_batches(error: BaseException) -> None:
    def source() -> Iterator[Batch]:
        yield batch(0)
        yield batch(1)
        raise error

    seen = []
    with CpuBackend().loader(source()) as ready, pytest.raises(type(error)) as caught:
        for item in ready:
            seen.append(int(item["x"]))
    assert seen == [0, 1] and caught.value is error


def test_leaving_early_ends_the_thread_and_closes_the_source() -> None:
    made: list[int] = []

    def source() -> Iterator[Batch]:
        for number in count():
            made.append(number)
            yield batch(number)

    with prefetched(source(), depth=2) as ready:
        next(ready)
    assert threads() == 0
    assert len(made) <= 5  # one taken, two ready, one waiting, one more after the first was taken
    after = len(made)
    time.sleep(0.15)
    assert len(made) == after


def test_a_failing_consumer_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), prefetched((batch(i) for i in count()), depth=2) as ready:
        next(ready)
        raise ZeroDivisionError
    assert threads() == 0


def test_backends_by_name() -> None:
    assert open_backend("cpu").name == "cpu"
    with pytest.raises(ConfigError, match="backend 'tpu'"):
        open_backend("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            open_backend("cuda")


def test_cpu_to_host_is_a_copy() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    (copy,) = CpuBackend().to_host([tensor])
    tensor.data += 1
    assert copy.tolist() == [0, 0, 0] and not copy.requires_grad
