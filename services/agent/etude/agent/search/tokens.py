"""Words of code and of questions: identifiers are cut where their case changes."""

import math
import re
from collections import Counter
from typing import NamedTuple

MAX_WORD_CHARS = 32
MAX_COUNT = 64
COUNT_WEIGHTS = (0, *(round(16 * (1 + math.log(n))) for n in range(1, MAX_COUNT + 1)))
"""Weight of a word by its number of occurrences in a text: the logarithm, in whole numbers."""
_WORD = re.compile(r"[A-Za-z][a-z]+|[A-Z]+(?![a-z])|[0-9]+")


class Passage(NamedTuple):
    """A text with the counts of its words."""

    text: str
    counts: Counter[str]


def split_words(text: str) -> list[str]:
    """Words in their order, lower-cased: `parse_HTTPHeader2` has parse, http, header and 2."""
    return [word[:MAX_WORD_CHARS].lower() for word in _WORD.findall(text)]


def count_words(text: str) -> Passage:
    """Count the words of a text."""
    return Passage(text, Counter(split_words(text)))
