"""A text with gaps: the input of `lm.fill`.

fill(lm, "The ", gap, " sat on the mat")            # any number of tokens
fill(lm, "The ", gap(2), " sat on the ", gap(1, 8)) # two tokens; one to eight
fill(lm, "The ___ sat on the mat")                  # the same as the first
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from unspool.errors import SettingsError

LONGEST = 256  # maximum tokens of a gap
_MARK = re.compile("_{3,}")


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap of `least` to `most` tokens."""

    least: int = 1
    most: int = 16

    def __call__(self, least: int, most: int | None = None) -> Gap:
        """Return a gap of exactly `least` tokens, or of `least` to `most` tokens."""
        most = least if most is None else most
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in (least, most)):
            raise SettingsError(
                f"a gap's length must be given as integers, got {least!r} to {most!r}"
            )
        if not 0 <= least <= most or not 1 <= most <= LONGEST:
            raise SettingsError(
                f"a gap needs 0 <= least <= most and 1 <= most <= {LONGEST} tokens, got {least} to "
                f"{most}"
            )
        return Gap(least, most)

    def __repr__(self) -> str:
        if self == gap:
            return "gap"
        sizes = [self.least] if self.least == self.most else [self.least, self.most]
        return f"gap({', '.join(map(str, sizes))})"


gap = Gap()
"""A gap of 1 to 16 tokens; `gap(2)` has two, `gap(1, 8)` one to eight."""


@dataclass(frozen=True, slots=True)
class GappedText:
    """Texts and the gaps between them; there is one text more than gaps."""

    texts: tuple[str, ...]
    gaps: tuple[Gap, ...]

    @classmethod
    def parse(cls, parts: Sequence[str | Gap], usual: Gap = gap) -> GappedText:
        """Parse texts and gaps, or one text with ___ in it."""
        if len(parts) == 1 and isinstance(parts[0], str):
            texts = _MARK.split(parts[0])
            if len(texts) == 1:
                raise SettingsError(
                    'the text has no gap; mark it with three underscores: "The ___ sat on the mat"'
                )
            return cls(tuple(texts), (usual,) * (len(texts) - 1))
        parsed: list[str] = [""]
        gaps: list[Gap] = []
        for part in parts:
            if isinstance(part, Gap):
                if gaps and not parsed[-1]:
                    raise SettingsError("two gaps are adjacent; merge them into one")
                gaps.append(part)
                parsed.append("")
            elif isinstance(part, str):
                parsed[-1] += part
            else:
                raise SettingsError(
                    f"each part must be a text or a gap (unspool.gap), got {part!r}"
                )
        if not gaps:
            raise SettingsError(
                'there is nothing to fill; put a gap between texts: lm.fill("The ", unspool.gap, '
                '" sat on the mat")'
            )
        return cls(tuple(parsed), tuple(gaps))

    def filled(self, fillings: Sequence[str]) -> str:
        """The text with its gaps filled."""
        pairs = zip(fillings, self.texts[1:], strict=True)
        return self.texts[0] + "".join(inside + after for inside, after in pairs)

    def first(self, count: int) -> GappedText:
        """Only the first `count` gaps and the texts around them."""
        return GappedText(self.texts[: count + 1], self.gaps[:count])
