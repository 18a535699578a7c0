"""What the main node concludes from what it hears."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.node.gang import Roster

RETRY, PREEMPTED = 75, 143


def roll(num_nodes: int = 3, *, joined: bool = True) -> Roster:
    one = Roster(num_nodes, lost_after_s=30.0)
    for node in range(1, num_nodes) if joined else ():
        one.heard[node] = 0.0
    return one


def test_all_well() -> None:
    one = roll()
    for node in (1, 0, 2):
        assert not one.settled
        one.report(node, 0)
    assert one.check(1000.0) == []  # who has reported may fall silent
    assert (one.settled, one.trouble, one.exit_code(stopped=False)) == (True, "", 0)


def test_a_silent_node_is_lost_and_named() -> None:
    one = roll()
    one.heard[1] = 25.0
    assert (one.check(30.0), one.trouble) == ([], "")
    assert (one.check(30.1), one.check(30.2)) == ([2], [])
    assert one.trouble == "node 2 is lost: no heartbeat for 30s"
    for node in (0, 1):
        one.report(node, PREEMPTED)  # told to stop
    assert (one.settled, one.exit_code(stopped=False)) == (True, RETRY)


@pytest.mark.parametrize("code", [65, 70, 74, 78, 80])
@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_code_that_must_not_be_retried_goes_before_all(node: int, code: int) -> None:
    one = roll()
    one.lose((node + 1) % 3 or 1, "gone") if node != 1 else one.lose(2, "gone")
    for other in range(3):
        one.report(other, code if other == node else RETRY)
    assert one.exit_code(stopped=False) == code


def test_a_bug_counts_when_it_came_first() -> None:
    first, after = roll(2), roll(2)
    first.report(1, 1)
    first.report(0, RETRY)
    assert (first.trouble, first.exit_code(stopped=False)) == ("node 1 exited with 1", 1)
    after.lose(1, "gone")
    after.report(0, 1)  # a peer of a node that vanished fails in ways of its own
    assert after.exit_code(stopped=False) == RETRY


def test_stopped_from_outside() -> None:
    one = roll(2)
    one.report(0, PREEMPTED)
    one.report(1, PREEMPTED)
    assert (one.exit_code(stopped=True), one.exit_code(stopped=False)) == (PREEMPTED, RETRY)


def test_who_reported_and_then_vanished_has_done_its_part() -> None:
    one = roll(2)
    one.report(1, 0)
    one.lose(1, "the connection was closed")
    one.report(0, 0)
    assert (one.trouble, one.exit_code(stopped=False)) == ("", 0)


def test_nodes_that_never_came() -> None:
    one = roll(4, joined=False)
    one.heard[2] = 0.0
    one.give_up_waiting(900.0)
    assert one.trouble == "node 1, 3 of 4 has not come within 15m00s"
    one.report(0, RETRY)
    one.report(2, PREEMPTED)
    assert (one.settled, one.exit_code(stopped=False)) == (True, RETRY)


def test_after_trouble_nobody_waits_for_latecomers() -> None:
    one = roll(3, joined=False)
    one.heard[1] = 0.0
    one.report(1, 78)
    one.report(0, RETRY)
    assert (one.settled, one.exit_code(stopped=False)) == (True, 78)


@pytest.mark.parametrize("node", [-1, 0, 1, 3])
def test_a_node_comes_once_and_has_a_number_of_the_job(node: int) -> None:
    one = roll(3, joined=False)
    one.heard[1] = 0.0
    assert not one.takes(node)
    assert one.takes(2)


def test_what_is_seen() -> None:
    one = roll(3, joined=False)
    one.heard[1] = 5.0
    one.report(1, 0)
    seen = one.seen(7.0)
    assert [(row.node, row.heard_s_ago, row.exit_code) for row in seen] == [
        (0, None, None),
        (1, 2.0, 0),
        (2, None, None),
    ]


events = st.lists(
    st.tuples(st.sampled_from(["report", "lose"]), st.integers(0, 3), st.sampled_from([0, 1, 65, 75, 143]))
)


@given(events)
def test_zero_means_that_every_node_reported_zero(history: list[tuple[str, int, int]]) -> None:
    one = roll(4)
    last: dict[int, int] = {}
    for kind, node, code in history:
        if kind == "report":
            one.report(node, code)
            last[node] = code
        elif node:
            one.lose(node, "gone")
    assert (one.exit_code(stopped=False) == 0) == (len(last) == 4 and not any(last.values()))
