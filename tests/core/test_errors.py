"""The error family and its exit codes."""

import pytest

from pipeline.core import errors
from pipeline.core.errors import EXIT_TABLE, ConfigError, TrnpipeError, exit_code_of

# design.md, "Errors and exit codes". AWS Batch rules and operators' scripts rest on these numbers.
TABLE = {
    "ConfigError": (78, False),
    "DataError": (65, False),
    "CheckpointError": (74, False),
    "NumericError": (70, False),
    "GateRefused": (80, False),
    "TransientError": (75, True),
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
