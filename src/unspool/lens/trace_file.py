"""A trace in a file.

    save_trace(trace_of(lm, generation), "leaves.json")
    trace = load_trace("leaves.json")

The file is JSON. Numbers are written so that they come back bit for bit. Whatever a file holds,
reading it gives a `Trace` or one line that says what is wrong with it. How a file is read follows
from the types of the dataclasses, by pydantic; only what a type does not say stands here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import reprlib
from functools import cache, reduce
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Strict,
    Tag,
    TypeAdapter,
    ValidationError,
    create_model,
)

from unspool.engine.ending import Limits
from unspool.engine.steps import Candidate, Step
from unspool.errors import UnspoolError
from unspool.lens.trace import FORMAT, GUARD_NAMES, VERSION, Trace, saved_fields
from unspool.sampling import SamplingSettings, StageReport
from unspool.sampling.guards import GuardPolicy

_LARGEST = 256 << 20  # bytes of a file; a step with all its detail takes about three thousand
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}  # which JSON lacks


def _named_number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


_Whole = Annotated[int, Strict()]
_Count = Annotated[_Whole, Field(ge=0, le=2**63 - 1)]
_Size = Annotated[_Whole, Field(ge=0, le=1_000_000)]
_Token = Annotated[_Whole, Field(ge=0, le=10_000_000)]
_Byte = Annotated[_Whole, Field(ge=0, le=255)]
_Real = Annotated[float, Strict(), BeforeValidator(_named_number)]
# Sums of what a float32 can hold do not overflow.
_Finite = Annotated[float, Strict(), Field(ge=-1e39, le=1e39, allow_inf_nan=False)]

# Type -> the type that reads it.
_BY_TYPE: dict[Any, Any] = {
    float: _Real,
    bool: Annotated[bool, Strict()],
    str: Annotated[str, Strict(), Field(max_length=1_000_000)],
}
# Class -> what its whole numbers may be; `_Count` in others.
_WHOLE: dict[Any, Any] = dict.fromkeys((GuardPolicy, *GUARD_NAMES), _Size)
_WHOLE[SamplingSettings] = Annotated[_Whole, Field(ge=-1, le=1_000_000_000)]
# Class -> fields that may not be all that their types allow, or are written in another way.
_FIELDS: dict[Any, dict[str, Any]] = {
    Trace: {"prompt": tuple[_Token, ...]},
    Candidate: {"token": _Token, "probability": Annotated[_Finite, Field(ge=0, le=1)]},
    StageReport: {"top": tuple[tuple[_Token, _Real], ...]},
    Limits: {"context": Annotated[_Count, Field(ge=1)], "end_ids": frozenset[_Token]},
    SamplingSettings: {
        "seed": _Whole,
        "stages": tuple[Annotated[str, Strict()], ...],  # a caller's own is in no trace
        "dry_breakers": tuple[tuple[_Token, ...], ...],
        "logit_bias": Annotated[list[tuple[_Token, _Real]], AfterValidator(dict)],
    },
    Step: {
        "token": _Token,
        "bytes": Annotated[list[_Byte], AfterValidator(bytes)],
        # A person may have chosen what the model thought impossible.
        "logprob": Annotated[Literal["-inf"], AfterValidator(float)] | _Finite,
        "entropy": _Finite | None,
        "seconds": _Finite,
        "probability": Annotated[_Finite, Field(gt=0, le=1)] | None,  # what was picked was possible
        "draft": Literal["accepted", "rejected"] | None,
    },
}


# Class -> fields that older files lack, and what they stand for there.
_LATER: dict[Any, dict[str, Any]] = {
    Limits: {"endless": None},
    Trace: {"thoughts": "", "think_budget": None},
}


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace to a file: the whole of it, or nothing."""
    target = Path(path).expanduser()
    content = json.dumps(trace.to_dict(), allow_nan=False, separators=(",", ":"))
    try:
        target = target.resolve()  # a link stays a link
        if target.exists() and not target.is_file():
            raise UnspoolError(f"{path} is not a file; give the name of one")
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_text(content + "\n", encoding="utf-8")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UnspoolError(f"{path} cannot be written: {error.strerror or error}") from error


@cache
def _reader() -> TypeAdapter[Trace]:
    named = [Annotated[_read(kind), Tag(name)] for kind, name in GUARD_NAMES.items()]
    guard: Any = reduce(operator.or_, named)
    kind = Discriminator(lambda value: value.get("kind") if isinstance(value, dict) else None)
    _FIELDS[GuardPolicy] = {"guards": tuple[Annotated[guard, kind], ...]}
    return TypeAdapter(_read(Trace))


def _read(kind: Any, whole: Any = _Count) -> Any:
    """The type that reads values of this type; `whole`: what a whole number may be."""
    if dataclasses.is_dataclass(kind):
        hints, own, whole = get_type_hints(kind), _FIELDS.get(kind, {}), _WHOLE.get(kind, whole)
        names, later = [field.name for field in saved_fields(kind)], _LATER.get(kind, {})
        fields: dict[str, Any] = {
            name: (own.get(name) or _read(hints[name], whole), later.get(name, ...))
            for name in names
        }
        model: Any = create_model(getattr(kind, "__name__", ""), **fields)
        make: Any = kind
        return Annotated[model, AfterValidator(lambda found: make(**dict(found)))]
    if kind is int:
        return whole
    parts = get_args(kind)
    if not parts or get_origin(kind) in (Literal, dict):
        return _BY_TYPE.get(kind, kind)
    parts = tuple(part if part is ... else _read(part, whole) for part in parts)
    return GenericAlias(tuple, parts) if get_origin(kind) is tuple else reduce(operator.or_, parts)


def trace_from(data: Any) -> Trace:
    """A trace from what `Trace.to_dict` gave."""
    if not isinstance(data, dict):
        raise UnspoolError("the file holds no JSON object")
    if data.get("format") != FORMAT:
        raise UnspoolError("this is no trace of Unspool")
    if data.get("version") != VERSION or isinstance(data.get("version"), bool):
        version = reprlib.repr(data.get("version"))
        raise UnspoolError(f"its version is {version}; this Unspool reads version {VERSION}")
    try:
        trace = _reader().validate_python(data)
    except ValidationError as error:
        raise UnspoolError(_first_fault(error)) from None
    for number, step in enumerate(trace.steps):
        if step.position != (wanted := len(trace.prompt) + number):
            raise UnspoolError(
                f"steps[{number}].position is {step.position}; it should be {wanted}: steps follow "
                "the prompt, one a token"
            )
    if not trace.prompt:
        raise UnspoolError("its prompt is empty")
    if trace.given > len(trace.steps):
        raise UnspoolError(f"given is {trace.given}, and there are {len(trace.steps)} steps")
    return trace


def _first_fault(error: ValidationError) -> str:
    """Where the first fault is and what it is, in one line."""
    fault = error.errors(include_url=False)[0]
    place = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in fault["loc"]).strip(
        "."
    )
    if fault["type"] == "missing":
        return f"{place} is missing"
    if fault["type"] == "string_unicode":
        return f"{place} holds half a character"
    message = " ".join(fault["msg"].replace("Input", "it", 1)[:200].split())
    return f"{place} is {reprlib.repr(fault['input'])}; {message}"


def load_trace(path: str | Path) -> Trace:
    """Read a trace; `UnspoolError`, in one line, if the file is not one."""
    source = Path(path).expanduser()
    try:
        with source.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UnspoolError(f"has more than {_LARGEST >> 20} MB; this is no trace")
        return trace_from(json.loads(content.decode("utf-8"), parse_constant=_no_constant))
    except OSError as error:
        raise UnspoolError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnspoolError as error:
        raise UnspoolError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too deep, a giant number
        raise UnspoolError(f"{path}: is not JSON: {str(error).splitlines()[0]}") from None


def _no_constant(name: str) -> Any:
    raise UnspoolError(f"{name} is no number in JSON")
