"""Cleans a text before it is encoded."""

import re

from plaingpt.base.errors import UserError

LONG_SPACE = 500_000


def clean_text(text):
    """Replaces each half of a surrogate pair with U+FFFD, as tiktoken does -> text.

    Raises UserError if a row of spaces would overflow the stack of tiktoken's regex.
    """
    # With (?<!\s), a match begins only at the first space of a row. Otherwise, the search would
    # take quadratic time.
    if len(text) >= LONG_SPACE and re.search(rf"(?<!\s)\s{{{LONG_SPACE}}}", text):
        raise UserError(f"{LONG_SPACE:,} or more white spaces in a row; remove some of them")
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
