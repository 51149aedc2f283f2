"""What is known of a request's form before it is checked.

OpenAI's and Anthropic's APIs have more than is here. A parameter that they know and this server
does not have is refused by its name and with the reason, unless its value asks for nothing. Where a
value may have one of several forms, the form is chosen before it is checked, so that an error is
about that form alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from unspool.serve.faults import unsupported
from unspool.serve.schemas.common import Seed, Strict
from unspool.serve.schemas.extension import Extension

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Reasons = Mapping[str, str]
Values = Mapping[str, Collection[Any]]


class ExtensionWithSeed(Extension):
    """For APIs that know no seed."""

    seed: Seed | None = Field(None, description="same seed, same text")


class Refusing(Strict):
    """Something that has more parameters elsewhere than here."""

    absent: ClassVar[Reasons] = {}  # these, and why they are not here
    harmless: ClassVar[Values] = {}  # values of them that ask for nothing

    @model_validator(mode="before")
    @classmethod
    def _refuse_absent(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            usual = (None, False, [], {}, *cls.harmless.get(name, ()))
            if name in cls.absent and value not in usual:
                raise unsupported(name, cls.absent[name])
        return {name: value for name, value in given.items() if name not in cls.absent}


def text_or_list(given: Any) -> str:
    """Which of the two it is: tags begin with a capital, as `faults.invalid` expects."""
    return "Text" if isinstance(given, str) else "List"


def by_type(
    what: str, tags: Mapping[str, str], why: str, usual: str | None = None
) -> Callable[[Any], str]:
    """The tag of what is described by a `type`; other types are refused by name.

    `usual` is the type of what has none. What is no type at all gets the first tag, to be found
    wrong with that.
    """
    first = next(iter(tags.values()))

    def found(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        if not isinstance(kind, str):
            return first if usual is None or kind is not None else tags[usual]
        if kind not in tags:
            raise unsupported(f"{what} of type {kind[:60]!r}", why)
        return tags[kind]

    return found
