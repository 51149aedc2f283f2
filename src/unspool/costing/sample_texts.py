"""Human-written texts to measure on: the user's, or State of the Union addresses.

The addresses are the default training data (downloaded once); if they are not available, a few
pages in this package are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import SettingsError, UnspoolError, UnspoolWarning

_SAMPLE_FILE = Path(__file__).parent / "sample.txt"
_SEPARATOR = "\n\n* * *\n\n"  # between texts in the file
_FIRST = 100  # index of the first address to use: from about 1890 on, in modern language
_COUNT = 48
_MIN_CHARS = 2000  # of a text: parts take long excerpts from single texts


@dataclass(frozen=True)
class SampleTexts:
    """Texts with a description of their source."""

    texts: tuple[str, ...]
    source: str


def sample_texts(source: Sequence[str] | str | Path | None = None) -> SampleTexts:
    """Return the given texts, those of a source (file, folder, as for training), or the default."""
    if source is None:
        return _addresses()
    if isinstance(source, str | Path):
        from unspool.train.judging.judged_text import source_texts

        return _checked(list(source_texts([str(source)], limit=_COUNT)), str(source))
    return _checked(list(source), f"{len(source)} texts of the caller")


def _checked(texts: list[str], source: str) -> SampleTexts:
    long = tuple(text for text in texts if len(text) >= _MIN_CHARS)
    if not long:
        raise SettingsError(
            f"{source}: no text has {_MIN_CHARS:,} characters or more; give longer texts"
        )
    return SampleTexts(long, source)


def _addresses() -> SampleTexts:
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.judging.judged_text import source_texts

    try:
        every = list(source_texts([DEFAULT_SOURCE]))[_FIRST:]
    except (UnspoolError, OSError) as error:
        warnings.warn(
            f"measuring on a short sample text instead of the default texts: {error}",
            UnspoolWarning,
            stacklevel=2,
        )
        return packaged_sample()
    step = max(1, len(every) // _COUNT)
    return _checked(every[::step][:_COUNT], "State of the Union addresses, 1890 to today")


def packaged_sample() -> SampleTexts:
    """Return the pages in this package."""
    texts = _SAMPLE_FILE.read_text(encoding="utf-8").split(_SEPARATOR)
    return _checked(texts, "a few pages of State of the Union addresses")
