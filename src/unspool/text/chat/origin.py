"""Strings that record the origin of each character.

A chat template writes control tokens (`<|im_end|>`) and the caller's text into one string. If the
caller's text contains `<|im_end|>`, that is text and must not end the turn. So every string in a
template is a `Text`: a `str` with an origin for each character, which says to which message it
belongs (or to none) and whether the template wrote it. Joining, slicing, splitting, stripping and
replacing keep the origins. Any other operation returns an ordinary `str`, whose characters count as
the caller's: that can only lose a control token, never create one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, SupportsIndex

from markupsafe import escape

from unspool.errors import UnspoolError
from unspool.text.chat.budget import active_budget

_MAX_DEPTH = 100


def origin_mark(owner: int, *, template: bool) -> str:
    """Return the origin of one character. Owner n is message n, counted from 1; 0 means none."""
    return chr(2 * owner + template)


UNKNOWN = origin_mark(0, template=False)
TEMPLATE = origin_mark(0, template=True)


def is_template(origin: str) -> bool:
    """Return whether the template wrote all of these characters."""
    return all(ord(mark) & 1 for mark in set(origin))


class OriginText(str):
    """A string with an origin mark for each character."""

    __slots__ = ("_origin",)
    _origin: str

    def __new__(cls, text: str, origin: str = UNKNOWN) -> OriginText:
        """`origin` is one mark per character, or a single one for all."""
        self = super().__new__(cls, text)
        self._origin = origin * len(text) if len(origin) == 1 else origin
        return self

    def __str__(self) -> OriginText:
        return self

    def __add__(self, other: str) -> OriginText:
        return concat((self, other))

    def __radd__(self, other: str) -> OriginText:
        return concat((other, self))

    def __mul__(self, count: SupportsIndex) -> OriginText:
        return OriginText(super().__mul__(count), self._origin * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> OriginText:
        return _format_percent(self, values)

    def __getitem__(self, index: SupportsIndex | slice) -> OriginText:
        return OriginText(super().__getitem__(index), self._origin[index])

    def lstrip(self, chars: str | None = None, /) -> OriginText:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> OriginText:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> OriginText:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> OriginText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> OriginText:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def _located(self, parts: Collection[str], gap: int | None) -> list[OriginText]:
        """Return `parts` as `Text`; they are in order, `gap` characters apart (None: blanks)."""
        active_budget().check(16 * len(parts))  # each is a new object
        located, at = [], 0
        for part in parts:
            at = at if gap is not None else self.index(part, at)
            located.append(self[at : at + len(part)])
            at += len(part) + (gap or 0)
        return located

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[OriginText]:  # type: ignore[override]
        return self._located(super().split(sep, maxsplit), len(sep) if sep else None)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[OriginText]:  # type: ignore[override]
        return self._located(super().rsplit(sep, maxsplit), len(sep) if sep else None)

    def splitlines(self, keepends: bool = False) -> list[OriginText]:  # type: ignore[override]
        lines = self._located(super().splitlines(keepends=True), 0)
        ends = super().splitlines(keepends)
        return [line[: len(end)] for line, end in zip(lines, ends, strict=True)]

    def partition(self, sep: str, /) -> tuple[OriginText, OriginText, OriginText]:
        before, separator, after = self._located(super().partition(sep), 0)
        return before, separator, after

    def rpartition(self, sep: str, /) -> tuple[OriginText, OriginText, OriginText]:
        before, separator, after = self._located(super().rpartition(sep), 0)
        return before, separator, after

    def join(self, items: Iterable[str], /) -> OriginText:
        pieces: list[str] = []
        for item in items:
            pieces += (self, item)
        return concat(pieces[1:])

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> OriginText:
        if old:
            return OriginText(new, origin_of(new)).join(self.split(old, count))
        concat([new] * (len(self) + 1))  # charge for the result
        return OriginText(super().replace(old, new, count))

    def _same_length(self, changed: str) -> OriginText:
        return OriginText(changed, self._origin if len(changed) == len(self) else UNKNOWN)

    def lower(self) -> OriginText:
        return self._same_length(super().lower())

    def upper(self) -> OriginText:
        return self._same_length(super().upper())

    def capitalize(self) -> OriginText:
        return self._same_length(super().capitalize())

    def title(self) -> OriginText:
        return self._same_length(super().title())


class SafeOriginText(OriginText):
    """Result of the filters `safe` and `escape`: as in Jinja, `+` escapes the other operand."""

    __slots__ = ()

    def __add__(self, other: str) -> SafeOriginText:
        joined = concat((self, escaped(other)))
        return SafeOriginText(joined, joined._origin)

    def __radd__(self, other: str) -> SafeOriginText:
        joined = concat((escaped(other), self))
        return SafeOriginText(joined, joined._origin)


def escaped(text: str) -> OriginText:
    """Escape HTML: &lt; for < and so on."""
    if isinstance(text, SafeOriginText):
        return text
    return OriginText(text, origin_of(text))._same_length(str(escape(str.__str__(text))))


def origin_of(text: str) -> str:
    return text._origin if isinstance(text, OriginText) else UNKNOWN * len(text)


def concat(pieces: Iterable[str]) -> OriginText:
    budget, length, texts = active_budget(), 0, []
    for piece in pieces:
        length += len(piece)
        budget.check(length)
        texts.append(piece)
    budget.charge_text(length)
    return OriginText("".join(texts), "".join(map(origin_of, texts)))


def with_origin(value: Any, origin: str, depth: int = 0) -> Any:
    """Return the JSON-like value with each string as a `Text` of this origin."""
    if isinstance(value, str):
        return OriginText(value, origin)
    if depth > _MAX_DEPTH:
        raise UnspoolError(f"values may be nested at most {_MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {key: with_origin(item, origin, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [with_origin(item, origin, depth + 1) for item in value]
    return value


_FIELD = re.compile(r"%(\([^)]*\))?[-#0 +]*(\d*)(?:\.(\d*))?[hlL]?([a-zA-Z%])")


def _format_percent(layout: OriginText, values: Any) -> OriginText:
    """`layout % values`."""
    if re.search(r"%[^a-zA-Z%]*\*", layout):
        active_budget().refuse("uses a computed field width")
    active_budget().charge_widths(layout)
    active_budget().check((1 + layout.count("%(")) * active_budget().measure(values))
    plain = str.__mod__(layout, values)
    arguments = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    at = 0
    for field in _FIELD.finditer(layout):
        pieces.append(layout[at : field.start()])
        at = field.end()
        if field[4] == "%":
            pieces.append("%")
            continue
        value = values[field[1][1:-1]] if field[1] else next(arguments, None)
        spec = field[0].replace(field[1] or "", "", 1)
        is_plain_string = spec == "%s" and isinstance(value, str)
        pieces.append(str(value) if is_plain_string else str.__mod__(spec, (value,)))
    return result if (result := concat([*pieces, layout[at:]])) == plain else OriginText(plain)
