"""Which share of the work is ours."""

import pytest

from pipeline.core.errors import ConfigError
from pipeline.parallel.world import ARRAY_INDEX, World, worker_of


@pytest.mark.parametrize(
    ("config", "world", "env", "expected"),
    [
        ({}, World(), {}, (0, 1)),
        ({}, World(rank=2, world_size=4), {}, (2, 4)),
        ({"workers": 7}, World(), {ARRAY_INDEX: "5"}, (5, 7)),
        ({"workers": 7, "worker": 0}, World(), {ARRAY_INDEX: "5"}, (0, 7)),
        ({"workers": 3, "worker": 2}, World(rank=1, world_size=4), {}, (9, 12)),
    ],
)
def test_jobs_and_ranks_together(
    config: dict[str, int], world: World, env: dict[str, str], expected: tuple[int, int]
) -> None:
    assert worker_of(config.get("workers", 1), world, env, "embed", config.get("worker")) == expected


@pytest.mark.parametrize(
    ("config", "env", "reason"),
    [
        ({}, {ARRAY_INDEX: "0"}, "every job of the array would do all the work"),
        ({"workers": 4}, {}, "nothing says which of them this is"),
        ({"workers": 4}, {ARRAY_INDEX: "4"}, "TRNJOBS_INDEX is 4 of 4 workers"),
        ({"workers": 4, "worker": 4}, {}, "embed.worker is 4 of 4 workers"),
        ({"workers": 4}, {ARRAY_INDEX: "x"}, "is 'x'"),
    ],
)
def test_what_does_not_fit_together_is_refused(config: dict[str, int], env: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        worker_of(config.get("workers", 1), World(), env, "embed", config.get("worker"))
