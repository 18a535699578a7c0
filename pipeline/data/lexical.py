"""Split text in any script into words, as BM25 indexes them, and compute word-overlap features of a query and a title.

In scripts without spaces between words (Chinese, Japanese, Thai, Khmer, Lao, Burmese and related scripts) each
character and each pair of adjacent characters is a word, so that a query matches a title that contains it. In all
other scripts a word is a run of letters and digits. Vowel signs and other marks (categories Mn and Mc) belong to the
character before them.

Every feature is a function of the two texts alone, so that serving and embedding can compute it without statistics.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from math import log, log1p
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.config import DataConfig

_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f"  # Myanmar
    "\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\uaa80-\uaadf"  # Khmer; Tai Le, New Tai Lue, Tai Tham, Tai Viet
    "\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303c"  # ideographic marks and numbers
    "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f\U0001b000-\U0001b16f"  # Hiragana, Katakana
    "\u3100-\u312f\u31a0-\u31bf"  # Bopomofo
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"  # Han
)
"""Ranges of a character class. Korean is missing because it separates words by spaces."""
_JOINERS = "\u200c\u200d"
"""Part of a word after a mark, as in Sinhala or Malayalam. They only select the form of a letter."""
_LAST_MARK = 0x1FFFF  # the only marks above it are variation selectors


class _Patterns(NamedTuple):
    marks: str
    word: re.Pattern[str]
    unspaced: re.Pattern[str]
    unit: re.Pattern[str]


@cache
def _patterns() -> _Patterns:
    ranges = list[list[int]]()
    for code in range(0x300, _LAST_MARK + 1):
        if unicodedata.category(chr(code)) in ("Mn", "Mc"):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    chars = "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
    marks = f"(?:[{chars}][{_JOINERS}]?)*"
    return _Patterns(
        marks=marks,
        word=re.compile(rf"(?:\w{marks})+"),
        unspaced=re.compile(rf"(?=\w)[{_UNSPACED}]"),
        unit=re.compile(rf"(?=\w)(?P<unspaced>[{_UNSPACED}]{marks})|(?:[^\W{_UNSPACED}]{marks})+"),
    )


_ASCII_WORD = re.compile(r"\w+")
_HALF_WIDTH = re.compile("[\uff66-\uff9f]+")  # half-width Katakana, which are converted to full width


def lowered(text: str) -> str:
    """Return a text in lower case and, unless it is ASCII, in Unicode normalization form C."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFC", text.lower())


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, in order. An underscore counts as a letter."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return [word for run in _patterns().word.findall(lowered(text)) for word in split_run(run)]


def split_run(run: str) -> list[str]:
    """Return the words in a run of letters: the run itself unless it contains a script without spaces."""
    if run.isascii():
        return [run]
    if not _patterns().unspaced.search(run):
        return [_without_joiners(run)]
    run = _HALF_WIDTH.sub(lambda kana: unicodedata.normalize("NFKC", kana[0]), run)
    units, previous = list[str](), ""
    for match in _patterns().unit.finditer(run):
        char = match["unspaced"]
        if char is None:
            units.append(_without_joiners(match[0]))
            previous = ""
            continue
        char = _without_joiners(char)
        units += [previous + char, char] if previous else [char]
        previous = char
    return units


def _without_joiners(text: str) -> str:
    return text.replace("\u200c", "").replace("\u200d", "")


# Features for text that encoders represent poorly, such as model numbers and units.

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
"""Coverage: share of one side's words that occur on the other. Code: word with a digit. Squeezed: without spaces."""


@cache
def _part(*, ascii_only: bool) -> re.Pattern[str]:
    """Return a pattern for runs of letters and digits, with a point or comma only before a digit."""
    letter = r"[^\W_]" if ascii_only else rf"(?:[^\W_]{_patterns().marks})"
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
    words = tuple(word for part in parts for word in split_run(part))
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
    """Return the names of the numeric features in order: the configured columns, then the lexical features."""
    return config.numeric + (LEXICAL_NAMES if config.lexical else ())


def lexical_features(queries: Sequence[str], titles: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return features [N, len(LEXICAL_NAMES)] of N pairs, each 0 to about 1 (counts and lengths on a log scale)."""
    analyse = lru_cache(maxsize=_CACHED_TEXTS)(_analyse)
    values = [_pair_features(analyse(query), analyse(title)) for query, title in zip(queries, titles, strict=True)]
    return np.array(values, dtype=np.float32).reshape(len(values), len(LEXICAL_NAMES))


_CACHED_TEXTS = 1024  # because rows of a query are adjacent (20 KB per text of 100 characters, 130 KB for 1,000)


def _scaled(count: float) -> float:
    """Map a count to about 0..1 on a log scale: 0 -> 0, 19 -> 1."""
    return log1p(count) / _LOG20


def _pair_features(query: _Text, title: _Text) -> tuple[float, ...]:
    shared = len(query.word_set & title.word_set)
    num_query, num_title = len(query.word_set) or 1, len(title.word_set) or 1
    matches = [word for word in query.word_set if word in title.squeezed]
    matched_letters = sum(map(len, matches))
    trigrams = len(query.trigrams & title.trigrams)
    common_units = query.units.keys() & title.units.keys()
    shared_units = sum(1 for unit in common_units if query.units[unit] & title.units[unit])
    codes = len(query.codes & title.codes)
    prefix = 0
    for query_word, title_word in zip(query.words, title.words, strict=False):
        if query_word != title_word:
            break
        prefix += 1
    return (
        shared / (num_query + num_title - shared),
        shared / num_query,
        shared / num_title,
        codes / (len(query.codes) or 1),
        _scaled(len(query.codes) - codes),
        _scaled(len(title.codes) - codes),
        matched_letters / (query.num_letters or 1),
        _scaled(max(map(len, matches), default=0)),
        trigrams / ((len(query.trigrams) * len(title.trigrams)) ** 0.5 or 1.0),
        trigrams / (len(query.trigrams) or 1),
        prefix / num_query,
        float(bool(query.words) and query.words[0] in title.word_set),
        _scaled(shared_units),
        _scaled(len(common_units) - shared_units),
        _scaled(len(title.units) - len(common_units)),
        _scaled(len(query.words)),
        _scaled(len(title.words)),
        _scaled(query.num_letters / (len(query.words) or 1)),
        _scaled(title.num_letters / (len(title.words) or 1)),
    )
