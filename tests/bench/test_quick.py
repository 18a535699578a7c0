"""Every bench runs as `make bench` runs it: `--quick` proves that its script works, whatever its figures are."""

import pytest

from bench.__main__ import BENCHES, run_one

NAMES = [name for name, bench in BENCHES.items() if bench.by_default]


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*NAMES, "peer_speed"])
def test_a_bench_runs(name: str) -> None:
    if name == "peer_speed":
        pytest.importorskip("datasets", reason="of the peer; no extra has it")
    assert run_one(BENCHES[name], quick=True)
