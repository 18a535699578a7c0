"""Features of the word overlap between a query and a title: what a text encoder finds hard (model numbers, units).

Every feature is a function of the two texts only, so that serving and embedding can compute them without statistics.
"""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from math import log, log1p
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.config import DataConfig
from pipeline.data.words import lowered, units_of, with_marks

LEXICAL_NAMES = (
    "lex_jaccard",
    "lex_query_coverage",
    "lex_title_coverage",
    "lex_code_coverage",
    "lex_codes_missed",
    "lex_title_codes_missed",
    "lex_squeezed_coverage",
    "lex_longest_found",
    "lex_trigram_cosine",
    "lex_trigram_coverage",
    "lex_prefix_share",
    "lex_first_word",
    "lex_units_shared",
    "lex_units_conflict",
    "lex_units_only_title",
    "lex_query_words",
    "lex_title_words",
    "lex_query_word_length",
    "lex_title_word_length",
)
"""Coverage: share of one side's words found on the other. Code: word with a digit. Squeezed: letters, digits only."""


@cache
def _part(*, ascii_only: bool) -> re.Pattern[str]:
    """Letters and digits, with a point or comma before a digit."""
    letter = r"[^\W_]" if ascii_only else with_marks(r"[^\W_]")
    return re.compile(rf"{letter}+(?:[.,](?=\d){letter}+)*")


_UNIT = re.compile(r"(?<![^\W_])(\d+(?:[.,]\d+)?)\s?([^\W\d_]{1,4}|\"|%)(?![^\W_])")
_LOG20 = log(20)
_DIGIT = re.compile(r"\d")


class _Text(NamedTuple):
    words: tuple[str, ...]
    word_set: frozenset[str]
    codes: frozenset[str]
    squeezed: str
    trigrams: frozenset[str]
    units: dict[str, frozenset[str]]
    num_letters: int


def _analyse(text: str) -> _Text:
    text = lowered(text)
    parts = _part(ascii_only=text.isascii()).findall(text)
    words = tuple(word for part in parts for word in units_of(part))
    padded = " " + " ".join(parts) + " "
    units: dict[str, set[str]] = {}
    for number, unit in _UNIT.findall(text):
        units.setdefault(unit, set()).add(number.replace(",", ".").removesuffix(".0"))
    return _Text(
        words,
        word_set := frozenset(words),
        frozenset(word for word in word_set if _DIGIT.search(word)),
        "".join(parts),
        frozenset([padded[i : i + 3] for i in range(len(padded) - 2)]),
        {unit: frozenset(numbers) for unit, numbers in units.items()},
        sum(map(len, words)),
    )


def numeric_names(config: DataConfig) -> tuple[str, ...]:
    """Numeric features of prepared rows, in their order: the configured columns, then the lexical ones."""
    return config.numeric + (LEXICAL_NAMES if config.lexical else ())


def lexical_features(queries: Sequence[str], titles: Sequence[str]) -> npt.NDArray[np.float32]:
    """Features [N, len(LEXICAL_NAMES)] of N pairs, each 0 to about 1 (counts and lengths on a log scale)."""
    analyse = lru_cache(maxsize=_KEPT_TEXTS)(_analyse)
    values = [_pair(analyse(query), analyse(title)) for query, title in zip(queries, titles, strict=True)]
    return np.array(values, dtype=np.float32).reshape(len(values), len(LEXICAL_NAMES))


_KEPT_TEXTS = 1024
"""Texts whose parts are kept, as rows of a query are neighbours: 20 KB each at 100 characters, 130 KB at 1,000."""


def _scaled(count: float) -> float:
    """Counts to about 0..1: 0 -> 0, 19 -> 1."""
    return log1p(count) / _LOG20


def _pair(query: _Text, title: _Text) -> tuple[float, ...]:
    shared = len(query.word_set & title.word_set)
    num_query, num_title = len(query.word_set) or 1, len(title.word_set) or 1
    found = [word for word in query.word_set if word in title.squeezed]
    found_letters = sum(map(len, found))
    trigrams = len(query.trigrams & title.trigrams)
    both = query.units.keys() & title.units.keys()
    shared_units = sum(1 for unit in both if query.units[unit] & title.units[unit])
    codes = len(query.codes & title.codes)
    prefix = 0
    for one, other in zip(query.words, title.words, strict=False):
        if one != other:
            break
        prefix += 1
    return (
        shared / (num_query + num_title - shared),
        shared / num_query,
        shared / num_title,
        codes / (len(query.codes) or 1),
        _scaled(len(query.codes) - codes),
        _scaled(len(title.codes) - codes),
        found_letters / (query.num_letters or 1),
        _scaled(max(map(len, found), default=0)),
        trigrams / ((len(query.trigrams) * len(title.trigrams)) ** 0.5 or 1.0),
        trigrams / (len(query.trigrams) or 1),
        prefix / num_query,
        float(bool(query.words) and query.words[0] in title.word_set),
        _scaled(shared_units),
        _scaled(len(both) - shared_units),
        _scaled(len(title.units) - len(both)),
        _scaled(len(query.words)),
        _scaled(len(title.words)),
        _scaled(query.num_letters / (len(query.words) or 1)),
        _scaled(title.num_letters / (len(title.words) or 1)),
    )
