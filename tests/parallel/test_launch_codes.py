"""One exit code for all ranks of a run."""

from itertools import permutations
from pathlib import Path

import pytest

from pipeline.core.errors import EXIT_TABLE
from pipeline.parallel.launch import EXIT_DIR_VARIABLE, gang_exit_code, note_exit_code

STOPPING = [rule.exit_code for rule in EXIT_TABLE if not rule.retry]


@pytest.mark.parametrize(
    ("codes", "stopped", "expected"),
    [
        ([0, 0], False, 0),
        ([0], True, 0),  # done before the signal arrived
        ([70, 75], False, 70),  # one diverged, the other lost its peer
        ([75, 70], False, 70),
        ([1, 75], False, 1),
        ([75, 75], False, 75),
        ([0, 75], False, 75),
        ([None, 75], False, 75),  # killed outright
        ([None, None], False, 75),
        ([0, None], False, 75),
        ([143, 143], True, 143),
        ([143, 75], True, 143),
        ([None, 143], True, 143),
        ([143, 78], True, 78),
        ([-9, 75], False, 75),
        ([-9, 1], False, 75),  # a bug that comes of the loss of a peer
        ([-9, 70], False, 70),
        ([-11, 1], False, 1),
        ([7, 75], False, 7),
        ([7, None], True, 7),
        ([7, 1], False, 1),
        ([137, None], False, 75),  # as a shell says that its child was killed
    ],
)
def test_the_rank_that_says_most(codes: list[int | None], stopped: bool, expected: int) -> None:
    for order in permutations(codes):
        assert gang_exit_code(order, stopped=stopped) == expected


@pytest.mark.parametrize("code", STOPPING)
def test_what_must_not_be_retried_wins_over_anything(code: int) -> None:
    for other in (0, 1, 75, 143, None):
        assert gang_exit_code([other, code], stopped=True) == code


def test_a_rank_leaves_its_code_for_the_launcher(tmp_path: Path) -> None:
    note_exit_code(74, {EXIT_DIR_VARIABLE: str(tmp_path), "LOCAL_RANK": "1", "RANK": "5"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"local-rank-1": "74"}
    note_exit_code(74, {})  # not under our launcher
    note_exit_code(74, {EXIT_DIR_VARIABLE: str(tmp_path / "gone")})
