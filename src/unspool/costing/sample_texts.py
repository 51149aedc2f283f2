"""Texts that people wrote, to measure on: one's own, or addresses of presidents.

The addresses come with the default data of training (fetched once); where they cannot be had, a few
pages of them that lie here serve.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import SettingsError, UnspoolError, UnspoolWarning

_HERE = Path(__file__).parent / "sample.txt"
_BETWEEN = "\n\n* * *\n\n"  # two texts of it
_FIRST = 100  # of the addresses by year: from about 1890 on they are in today's language
_COUNT = 48
_SHORTEST = 2000  # characters: what parts cut from one text must be in it


@dataclass(frozen=True)
class SampleTexts:
    """Texts, and where they come from, in words."""

    texts: tuple[str, ...]
    source: str


def sample_texts(given: Sequence[str] | str | Path | None = None) -> SampleTexts:
    """Texts that were given, those of a source (a file, a folder, ... as for training), or ours."""
    if given is None:
        return _addresses()
    if isinstance(given, str | Path):
        from unspool.train.judging.judged_text import texts_of

        return _checked(list(texts_of([str(given)], limit=_COUNT)), str(given))
    return _checked(list(given), f"{len(given)} texts that were given")


def _checked(texts: list[str], source: str) -> SampleTexts:
    long = tuple(text for text in texts if len(text) >= _SHORTEST)
    if not long:
        raise SettingsError(
            f"{source}: no text of {_SHORTEST:,} characters or more to measure on; give longer ones"
        )
    return SampleTexts(long, source)


def _addresses() -> SampleTexts:
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.judging.judged_text import texts_of

    try:
        every = list(texts_of([DEFAULT_SOURCE]))[_FIRST:]
    except (UnspoolError, OSError) as error:
        warnings.warn(
            f"a short sample of text serves instead of the addresses: {error}",
            UnspoolWarning,
            stacklevel=2,
        )
        return shipped()
    step = max(1, len(every) // _COUNT)
    return _checked(every[::step][:_COUNT], "State of the Union addresses, 1890 to today")


def shipped() -> SampleTexts:
    """The few pages that lie here."""
    texts = _HERE.read_text(encoding="utf-8").split(_BETWEEN)
    return _checked(texts, "a few pages of State of the Union addresses")
