"""A text with gaps: what a caller gives to `lm.fill`.

fill(lm, "The ", gap, " sat on the mat")            # as many tokens as it takes
fill(lm, "The ", gap(2), " sat on the ", gap(1, 8)) # so many; at least, at most
fill(lm, "The ___ sat on the mat")                  # the same as the first, in one text
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from unspool.errors import SettingsError

LONGEST = 256  # tokens of a gap
_MARK = re.compile("_{3,}")


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that is to be written: from `least` to `most` tokens."""

    least: int = 1
    most: int = 16

    def __call__(self, least: int, most: int | None = None) -> Gap:
        """A gap of so many tokens, or of at least and at most so many."""
        most = least if most is None else most
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in (least, most)):
            raise SettingsError(f"a gap's length is {least!r} to {most!r}; whole numbers say it")
        if not 0 <= least <= most or not 1 <= most <= LONGEST:
            raise SettingsError(
                f"a gap of {least} to {most} tokens cannot be; it may have 0 to {LONGEST}, and "
                "at most no fewer than at least"
            )
        return Gap(least, most)

    def __repr__(self) -> str:
        if self == gap:
            return "gap"
        sizes = [self.least] if self.least == self.most else [self.least, self.most]
        return f"gap({', '.join(map(str, sizes))})"


gap = Gap()
"""A gap of a few tokens, as many as it takes; `gap(2)` has two, `gap(1, 8)` one to eight."""


@dataclass(frozen=True, slots=True)
class GappedText:
    """Texts and the gaps between them; one text more than there are gaps."""

    texts: tuple[str, ...]
    gaps: tuple[Gap, ...]

    @classmethod
    def of(cls, parts: Sequence[str | Gap], usual: Gap = gap) -> GappedText:
        """From what a caller gave: texts and gaps, or one text with ___ in it."""
        if len(parts) == 1 and isinstance(parts[0], str):
            texts = _MARK.split(parts[0])
            if len(texts) == 1:
                raise SettingsError(
                    'the text has no gap; mark it with three underscores: "The ___ sat on the mat"'
                )
            return cls(tuple(texts), (usual,) * (len(texts) - 1))
        found: list[str] = [""]
        gaps: list[Gap] = []
        for part in parts:
            if isinstance(part, Gap):
                if gaps and not found[-1]:
                    raise SettingsError("two gaps stand side by side; make one of them")
                gaps.append(part)
                found.append("")
            elif isinstance(part, str):
                found[-1] += part
            else:
                raise SettingsError(
                    f"a part to fill is {part!r}; each may be a text or a gap (unspool.gap)"
                )
        if not gaps:
            raise SettingsError(
                'there is nothing to fill; put a gap between texts: lm.fill("The ", unspool.gap, '
                '" sat on the mat")'
            )
        return cls(tuple(found), tuple(gaps))

    def filled(self, given: Sequence[str]) -> str:
        """The whole text with these in the gaps."""
        pairs = zip(given, self.texts[1:], strict=True)
        return self.texts[0] + "".join(inside + behind for inside, behind in pairs)

    def first(self, count: int) -> GappedText:
        """Only the first so many gaps, and the texts around them."""
        return GappedText(self.texts[: count + 1], self.gaps[:count])
