"""Flags in one spelling, and the cache's hash of them."""

import pytest

from pipeline.compile.config import CompilerFlags, flags_hash

# Hashes seen in real logs, by compiler version.
SEEN = [
    ("2.14.227.0", "trn1", (), "d41d8cd9"),
    ("2.14.227.0", "trn1", ("--model-type=transformer",), "abb26765"),
    ("2.14.227.0", "trn1", ("--model-type=transformer", "--auto-cast=none"), "2c2d707e"),
    ("2.15.128.0", "trn1", ("--model-type=transformer", "--auto-cast=none", "--execute-repetition=1"), "39f12043"),
    ("2.16.345.0", "trn1", (), "e30acd3a"),
    ("2.24.8799.0", "trn3", (), "70e3f644"),
    ("2.24.8799.0+5d3b2c1a", "trn1", ("--model-type=transformer",), "3cc9a3cb"),
    ("2.24.8799.0", "trn1", ("--model-type", "transformer"), "f7f529f3"),
]


@pytest.mark.parametrize(("compiler", "target", "tokens", "expected"), SEEN)
def test_the_hash_is_the_one_seen(compiler: str, target: str, tokens: tuple[str, ...], expected: str) -> None:
    assert flags_hash(tokens, compiler=compiler, target=target) == expected


def test_one_spelling_in_one_order() -> None:
    flags = CompilerFlags(auto_cast="all", optlevel=2)
    assert flags.text() == "--model-type=transformer --auto-cast=all --auto-cast-type=bf16 --optlevel=2"
    assert CompilerFlags().text() == "--model-type=transformer --auto-cast=none --optlevel=1"
