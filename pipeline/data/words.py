"""Words of a text in any script: what BM25 indexes, and what the lexical features compare. Pure.

Scripts that put no space between words (Chinese, Japanese, Thai, Khmer, Lao, Burmese and their relatives) give each
character and each pair of neighbours, so that a query finds a title which holds it. In all others a word is a run of
letters and digits. Vowel signs and other marks (categories Mn and Mc) belong to the character before them.
"""

import re
import unicodedata
from functools import cache
from typing import NamedTuple

_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f"  # Myanmar
    "\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\uaa80-\uaadf"  # Khmer; Tai Le, New Tai Lue, Tai Tham, Tai Viet
    "\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303c"  # ideographic marks and numbers
    "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f\U0001b000-\U0001b16f"  # Hiragana, Katakana
    "\u3100-\u312f\u31a0-\u31bf"  # Bopomofo
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"  # Han
)
"""Ranges of a character class. Korean separates words by spaces."""
_JOINERS = "\u200c\u200d"
"""Within a word where they follow a mark, as in Sinhala or Malayalam; they only choose the form of a letter."""
_LAST_MARK = 0x1FFFF
"""There is none above but variation selectors."""


class _Patterns(NamedTuple):
    marks: str
    word: re.Pattern[str]
    unspaced: re.Pattern[str]
    piece: re.Pattern[str]


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
        piece=re.compile(rf"(?=\w)(?P<unspaced>[{_UNSPACED}]{marks})|(?:[^\W{_UNSPACED}]{marks})+"),
    )


_ASCII_WORD = re.compile(r"\w+")
_HALF_WIDTH = re.compile("[\uff66-\uff9f]+")
"""Katakana, which are read as full-width ones."""


def with_marks(letter: str) -> str:
    """A pattern of the character class `letter` followed by the marks that belong to it."""
    return f"(?:{letter}{_patterns().marks})"


def lowered(text: str) -> str:
    """`text` in lower case, each letter with its marks composed where Unicode has one character for both."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFC", text.lower())


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, in order; an underscore counts as a letter."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return [word for run in _patterns().word.findall(lowered(text)) for word in units_of(run)]


def units_of(run: str) -> list[str]:
    """A run of letters itself, or its parts where it holds characters of a script without spaces."""
    if run.isascii():
        return [run]
    if not _patterns().unspaced.search(run):
        return [_without_joiners(run)]
    run = _HALF_WIDTH.sub(lambda kana: unicodedata.normalize("NFKC", kana[0]), run)
    units, before = list[str](), ""
    for piece in _patterns().piece.finditer(run):
        char = piece["unspaced"]
        if char is None:
            units.append(_without_joiners(piece[0]))
            before = ""
            continue
        char = _without_joiners(char)
        units += [before + char, char] if before else [char]
        before = char
    return units


def _without_joiners(text: str) -> str:
    return text.replace("\u200c", "").replace("\u200d", "")
