"""Tell the caller's characters from the template's, after a template has mixed them.

A chat template writes control tokens (`<|im_end|>`) and the caller's words into one text. If the
caller's words contain `<|im_end|>`, that is text and must not end the turn. So before rendering a
*mark*, a character that occurs nowhere else, is put into the caller's strings: after every
character that can begin a control token and before every one that can end it. A control token that
is spelled without a mark can then only have been written by the template, not even one half each;
and the marks travel along wherever the template moves, trims, splits or joins the strings.

The template must not notice the marks, so the string methods that would are given here once more,
in a form that looks through them. Positions and lengths are those of the text without marks.

The mark is a printable letter without case, because Python's repr, which some templates use to
write lists, would turn an unprintable one into an escape.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from unspool.errors import UnspoolError


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Yi syllables, then rare ideographs: printable, without case, not spaces, unchanged by NFKC.
_CANDIDATES = (*range(0xA000, 0xA48D), *range(0x3400, 0x4DB6))

# Templates build control tokens from these on purpose: '<|' + message.role + '|>'.
_USUAL_ROLES = words("system user assistant tool developer function ipython model environment")


def unused_characters(count: int, texts: Iterable[str]) -> list[str]:
    """Characters fit to be marks that occur in none of the texts; there are thousands."""
    used: set[str] = set().union(*texts)
    found = list(islice((chr(code) for code in _CANDIDATES if chr(code) not in used), count))
    if len(found) < count:
        raise UnspoolError("the messages use every rare character there is: shorten them")
    return found


def all_strings(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from all_strings(key)
            yield from all_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from all_strings(item)


class Marks:
    """One mark character, and the control tokens it guards against."""

    def __init__(self, mark: str, controls: Collection[str]) -> None:
        self.mark = mark
        self._longest = max(map(len, controls), default=0)
        self._spelled = "\0".join(controls)
        self._weak_spots, self._controls = _patterns(mark, tuple(controls))

    def protect(self, value: Any, *, is_role: bool = False) -> Any:
        """The same JSON-like value with marks in all of its strings."""
        if isinstance(value, str):
            return self._protect_text(value, is_role and value in _USUAL_ROLES)
        if isinstance(value, Mapping):
            # A key stays itself even where it is the inside of a control token, as `name` is that
            # of <|repo_name|>: a template finds values by it.
            return {
                self._protect_text(key, True) if isinstance(key, str) else key: self.protect(
                    item, is_role=key == "role"
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def _protect_text(self, text: str, may_name_a_token: bool) -> str:
        core = text.strip()
        if core and not may_name_a_token and len(core) < self._longest and core in self._spelled:
            # The whole string is the inside of a control token: '<|' + it + '|>' would be one.
            start = text.index(core)
            text = text[:start] + self.mark + core + self.mark + text[start + len(core) :]
        return self._weak_spots.sub(self.mark, text) if self._longest else text

    def plain(self, text: str) -> str:
        """The text without marks."""
        return text.replace(self.mark, "")

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Cut a rendered text into (piece, is a control token that the template wrote)."""
        done = 0
        for found in self._controls.finditer(text) if self._longest else ():
            if found.start() > done:
                yield text[done : found.start()], False
            yield found[0], True
            done = found.end()
        if done < len(text):
            yield text[done:], False

    def through(self, needle: str) -> re.Pattern[str]:
        """A pattern that finds `needle`, whatever marks are inside it."""
        return re.compile(f"{self.mark}*".join(map(re.escape, self.plain(needle))))

    def slice(self, text: str, where: slice) -> str:
        """`text[where]` with positions that do not count marks; marks at the cuts are kept."""
        places = [i for i, character in enumerate(text) if character != self.mark]
        chosen = places[where]
        if not chosen:
            return ""
        if where.step not in (None, 1):
            return "".join(text[i] for i in chosen)
        before = chosen[0]
        while before and text[before - 1] == self.mark:
            before -= 1
        after = chosen[-1] + 1
        while text[after : after + 1] == self.mark:
            after += 1
        return text[before:after]

    def call(self, method: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`text.method(*args)` as if no mark were there, with the marks kept in the result."""
        handler = getattr(self, f"_{method}", None) if method in _LOOK_THROUGH else None
        if handler is not None:
            return handler(text, *args, **kwargs)
        if method in _ASK or method.startswith("is"):
            asked = tuple(self._plain_argument(each) for each in args)
            return getattr(self.plain(text), method)(*asked, **kwargs)
        return getattr(text, method)(*args, **kwargs)

    def _plain_argument(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._plain_argument(each) for each in value)
        return self.plain(value) if isinstance(value, str) else value

    def _replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        if not old or count == 0:
            return text.replace(old, new, count)
        return self.through(old).sub(lambda _: new, text, count=max(count, 0))

    def _split(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        if sep is None or not sep or maxsplit == 0:
            return text.split(sep, maxsplit)
        return self.through(sep).split(text, maxsplit=max(maxsplit, 0))

    def _rsplit(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        if sep is None or not sep or maxsplit == 0:
            return text.rsplit(sep, maxsplit)
        found = list(self.through(sep).finditer(text))
        found = found[-maxsplit:] if maxsplit > 0 else found
        starts = [0, *(each.end() for each in found)]
        ends = [*(each.start() for each in found), len(text)]
        return [text[a:b] for a, b in zip(starts, ends, strict=True)]

    def _partition(self, text: str, sep: str) -> tuple[str, str, str]:
        found = self.through(sep).search(text) if sep else None
        if found is None:
            return text.partition(sep) if not sep else (text, "", "")
        return text[: found.start()], found[0], text[found.end() :]

    def _rpartition(self, text: str, sep: str) -> tuple[str, str, str]:
        found = list(self.through(sep).finditer(text)) if sep else []
        if not found:
            return text.rpartition(sep) if not sep else ("", "", text)
        return text[: found[-1].start()], found[-1][0], text[found[-1].end() :]

    def _removeprefix(self, text: str, prefix: str) -> str:
        if prefix and self.plain(text).startswith(self.plain(prefix)):
            return self.slice(text, slice(len(self.plain(prefix)), None))
        return text

    def _removesuffix(self, text: str, suffix: str) -> str:
        if suffix and self.plain(text).endswith(self.plain(suffix)):
            return self.slice(text, slice(0, -len(self.plain(suffix))))
        return text

    def _lstrip(self, text: str, chars: str | None = None) -> str:
        if chars is None:
            return text.lstrip()
        plain = self.plain(text)
        return self.slice(text, slice(len(plain) - len(plain.lstrip(chars)), None))

    def _rstrip(self, text: str, chars: str | None = None) -> str:
        if chars is None:
            return text.rstrip()
        return self.slice(text, slice(0, len(self.plain(text).rstrip(chars))))

    def _strip(self, text: str, chars: str | None = None) -> str:
        return self._rstrip(self._lstrip(text, chars), chars)

    def _capitalize(self, text: str) -> str:
        leading = len(text) - len(text.lstrip(self.mark))
        return text[:leading] + text[leading:].capitalize()

    def _title(self, text: str) -> str:
        titled = iter(self.plain(text).title())
        kept = "".join(each if each == self.mark else next(titled, "") for each in text)
        return kept + "".join(titled)


_LOOK_THROUGH = words(
    "replace split rsplit partition rpartition removeprefix removesuffix strip lstrip rstrip"
    " capitalize title"
)
_ASK = words("startswith endswith find rfind index rindex count")


@lru_cache(maxsize=32)
def _patterns(mark: str, controls: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    firsts = "".join(re.escape(each) for each in sorted({token[0] for token in controls}))
    lasts = "".join(re.escape(each) for each in sorted({token[-1] for token in controls}))
    weak_spots = f"(?<=[{firsts}])|(?=[{lasts}])" if controls else "(?!)"
    # A token of one character has no inside: the caller's has a mark on both sides instead.
    spelled = [
        re.escape(token)
        if len(token) > 1
        else f"(?<!{mark}){re.escape(token)}|{re.escape(token)}(?!{mark})"
        for token in sorted(controls, key=len, reverse=True)
    ]
    return re.compile(weak_spots), re.compile("|".join(spelled) or "(?!)")
