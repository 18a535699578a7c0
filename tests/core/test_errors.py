"""The error family and its exit codes."""

import io
from contextlib import redirect_stderr

import pytest

from pipeline.command_line import run_program
from pipeline.core import errors
from pipeline.core.errors import EXIT_TABLE, ConfigError, TrnpipeError, exit_code_of
from pipeline.io.storage import DiskFull, KeyNotFound

# design.md, "Errors and exit codes". AWS Batch rules and operators' scripts rest on these numbers.
TABLE = {
    "ConfigError": (78, False),
    "DataError": (65, False),
    "CheckpointError": (74, False),
    "NumericError": (70, False),
    "GateRefused": (80, False),
    "TransientError": (75, True),
    "AttemptsExhausted": (69, False),
    "Preempted": (143, True),
}


def test_the_table_is_the_contract() -> None:
    assert {rule.name: (rule.exit_code, rule.retry) for rule in EXIT_TABLE} == TABLE
    codes = [rule.exit_code for rule in EXIT_TABLE]
    assert len(set(codes)) == len(codes) and not {errors.EXIT_OK, errors.EXIT_BUG} & set(codes)


def test_every_direct_subclass_is_in_the_table() -> None:
    family = {kind.__name__ for kind in TrnpipeError.__subclasses__() if kind.__module__ == errors.__name__}
    assert family == TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_the_exit_code_of_an_instance(name: str) -> None:
    kind: type[TrnpipeError] = getattr(errors, name)
    assert exit_code_of(kind("seen")) == TABLE[name][0]


def test_other_exceptions() -> None:
    assert exit_code_of(ValueError()) == 1
    assert exit_code_of(KeyboardInterrupt()) == 143


def test_a_message_says_seen_expected_and_next() -> None:
    error = ConfigError("x is 3", expected="x below 2", next_command="set x")
    assert str(error) == "x is 3\n  expected: x below 2\n  next: set x"
    assert str(ConfigError("only seen")) == "only seen"


LOG_OF_A_STAGE = """\
prepare: reading
trnpipe prepare: DataError: j.csv has no column 'query'
  expected: one of its columns: a, b
  next: --data.columns.query
trnjobs-entry: post-mortem: file:///w/x.json
"""
SEEN = "DataError: j.csv has no column 'query'"
TWO_RANKS = """\
[1]: trnpipe train: TransientError: rank 0 is gone
[0]: trnpipe train: DataError: shard 3 is damaged
[1]:   next: trnjobs retry
[0]:   next: trnpipe prepare
trnpipe: rank 0 (process 7) exited with 65
"""
OF_PYTHON = """\
epoch 1
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'a'

During handling of the above exception, another exception occurred:

[rank0]: Traceback (most recent call last):
[rank0]:   File "a.py", line 3, in <module>
[rank1]: Traceback (most recent call last):
[rank0]: ValueError: of rank 0
[rank1]:   File "a.py", line 4, in <module>
[rank1]: ValueError: of rank 1
trnpipe: rank 1 (process 7) exited with 1
"""


@pytest.mark.parametrize(
    ("log", "code", "first", "last", "headline"),
    [
        (LOG_OF_A_STAGE, 65, SEEN, "  next: --data.columns.query", SEEN.partition(": ")[2]),
        (TWO_RANKS, 65, "DataError: shard 3 is damaged", "  next: trnpipe prepare", "shard 3 is damaged"),
        (TWO_RANKS, 75, "TransientError: rank 0 is gone", "  next: trnjobs retry", "rank 0 is gone"),
        (OF_PYTHON, 1, "Traceback (most recent call last):", "ValueError: of rank 1", "ValueError: of rank 1"),
        # a warning of a part that went on, then a bug
        (LOG_OF_A_STAGE + OF_PYTHON, 1, "Traceback (most recent call last):", "ValueError: of rank 1", None),
        (OF_PYTHON + LOG_OF_A_STAGE, None, SEEN, "  next: --data.columns.query", None),
        (
            "trnjobs-entry: ConfigError: no command\n  expected: one",
            78,
            "ConfigError: no command",
            "  expected: one",
            None,
        ),
        (
            "trnjobs-entry: exit 78: ConfigError: 'x' cannot be started",
            78,
            "ConfigError: 'x' cannot be started",
            None,
            None,
        ),
        ("SyntaxError: x\ntrnpipe: rank 0 (process 7) exited with 1", 1, "SyntaxError: x", None, "SyntaxError: x"),
        ("sh: 1: train: not found\n", 127, "sh: 1: train: not found", None, "sh: 1: train: not found"),
        ("a\r 10%\r\x1b[31m 20%\x1b[0m\r\n", 1, " 20%", None, "20%"),
        ("\x1b]0;title\x07a\x00b\u202egpj.exe", 1, " ]0;title a b gpj.exe", None, None),
    ],
)
def test_the_error_in_a_log(log: str, code: int | None, first: str, last: str | None, headline: str | None) -> None:
    found = errors.error_in_log(log.split("\n"), code)
    assert found[0] == first and last in (None, found[-1])
    assert headline in (None, errors.headline(found))


def test_an_error_of_a_more_special_class_is_found_by_the_name_of_its_exit_code() -> None:
    names = {kind: errors.reported_name(kind("x")) for kind in (KeyNotFound, DiskFull, errors.GateRefused, OSError)}
    assert [*names.values()] == ["DataError", "TransientError", "GateRefused", "OSError"]
    said = io.StringIO()

    def fail(name: str, arguments: list[str]) -> int:
        raise KeyNotFound("s3://b/x does not exist", next_command="check the URI")

    with redirect_stderr(said):
        assert run_program("trnpipe", {"embed": ""}, fail, ["embed"]) == 65
    found = errors.error_in_log(said.getvalue().splitlines(), 65)
    assert (found[0], errors.headline(found)) == ("DataError: s3://b/x does not exist", "s3://b/x does not exist")


def test_an_empty_log_has_no_error() -> None:
    assert errors.error_in_log(["", "  ", "trnjobs-entry: post-mortem: file:///w/x.json"]) == ()
    assert errors.headline(()) == ""


@pytest.mark.parametrize("before", ["", "Traceback (most recent call last):", "trnpipe train: DataError: seen"])
def test_an_error_is_bounded_and_keeps_its_end(before: str) -> None:
    log = [before, *(f"  line {i} " + "x" * 10_000 for i in range(1000)), "  next: do this"]
    found = errors.error_in_log(log, 65)
    assert len(found) <= errors.MAX_ERROR_LINES and all(len(line) <= errors.MAX_ERROR_CHARACTERS for line in found)
    assert found[-1] == "  next: do this"
    assert found[0] == "DataError: seen" or "DataError" not in before
