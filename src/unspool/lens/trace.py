"""Traces: everything that led to a generation, so that it can be shown and replayed.

`save_trace` and `load_trace` write and read files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

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

from unspool.backends.interventions import Intervention
from unspool.engine.generation import Generation, check_generation
from unspool.engine.request import Limits
from unspool.engine.results import Candidate, Step, brief
from unspool.errors import SettingsError, UnspoolError, count
from unspool.sampling import GrammarSpec, SamplingSettings, StageReport
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.monitors import BannedGuard, LoopGuard, SurpriseGuard
from unspool.session import Session

Value = TypeVar("Value")
FORMAT = "unspool-trace"
VERSION = 1
GUARD_NAMES: dict[type, str] = {LoopGuard: "loop", BannedGuard: "ban", SurpriseGuard: "surprise"}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of a model."""

    name: str
    config: dict[str, Any]
    precision: str
    weights: str  # a hash of some of the weights

    def __repr__(self) -> str:
        return f"<Fingerprint {self.name}, {self.precision}, {self.weights[:12]}>"

    def differs_from(self, other: Fingerprint) -> str | None:
        """Describe how this model differs from an earlier one; None: it is the same."""
        for name in sorted(self.config.keys() | other.config.keys()):
            new, old = self.config.get(name), other.config.get(name)
            if new != old:
                return f"its {name} is {reprlib.repr(new)}, was {reprlib.repr(old)}"
        if self.precision != other.precision:
            return f"its weights are in {self.precision}, were in {other.precision}"
        return None if self.weights == other.weights else "its weights are different"


@dataclass(frozen=True, slots=True)
class Trace:
    """A generation and its request."""

    model: Fingerprint  # what identifies the model
    prompt: tuple[int, ...]  # token ids
    settings: SamplingSettings  # of all sampling stages
    limits: Limits | None  # None: cannot be generated again (a caller's stage was used)
    steps: tuple[Step, ...]  # one for each new token
    given: int = 0  # number of first steps that were not generated, or chosen by a person
    empty_reason: str | None = None  # why there are no steps
    grammar: GrammarSpec | None = None  # constraint of the text
    guards: GuardPolicy | None = None  # that could rewind the text
    thoughts: str = ""  # "answer" or "call" if reasoning is separated from it
    think_budget: int | None = None  # reasoning tokens
    interventions: tuple[Intervention, ...] = ()  # changes inside the model
    guarded: bool = False  # had guards, even if `guards` cannot hold them (a caller's function)

    def __repr__(self) -> str:
        return (
            f"<Trace {brief(self.text)}, {count(len(self.steps), 'token')}, by {self.model.name}>"
        )

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(step.text for step in self.steps)

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return [step.token for step in self.steps]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `trace_from` reads it."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data = {"format": FORMAT, "version": VERSION, "text": self.text, **to_json_value(fields)}
        data["model"]["config"] = self.model.config
        if self.guards is not None:
            for guard, saved in zip(self.guards.guards, data["guards"]["guards"], strict=True):
                saved["kind"] = GUARD_NAMES[type(guard)]
        return data


def fingerprint(lm: Session) -> Fingerprint:
    config = json.loads(json.dumps(lm.config.to_dict()))  # as loaded from a file
    name = lm.path.name if lm.path else lm.config.family
    return Fingerprint(name, config, lm.model.precision, lm.model.fingerprint())


def trace_of(lm: Session, generation: Generation) -> Trace:
    """Make a trace of a generation. Generate with `explain` and `top` for full detail."""
    check_generation(generation)
    request, steps, thinking = generation.request, generation.steps, generation.request.thinking
    if request.adapter is not None:
        raise SettingsError(
            f"the text was generated with the adapter {request.adapter!r}, which a trace cannot "
            "hold; merge it into the model (unspool train merge) and use that"
        )
    chosen_steps = [number for number, step in enumerate(steps, start=1) if step.chosen]
    guards = request.guards
    can_save = guards is not None and all(type(guard) in GUARD_NAMES for guard in guards.guards)
    stages = tuple(stage for stage in request.settings.stages if isinstance(stage, str))
    has_custom_stage = len(stages) < len(request.settings.stages)
    return Trace(
        model=fingerprint(lm),
        prompt=tuple(generation.prompt),
        settings=replace(generation.settings, stages=stages)
        if has_custom_stage
        else generation.settings,
        limits=None if has_custom_stage else request.limits,
        steps=tuple(steps),
        given=min(len(steps), max([len(request.written), *chosen_steps])),
        empty_reason=generation.empty_reason,
        grammar=request.grammar.spec if request.grammar is not None else None,
        thoughts="" if thinking is None else "call" if thinking.is_call else "answer",
        think_budget=None if thinking is None else thinking.budget,
        interventions=request.interventions,
        guards=guards if can_save else None,
        guarded=guards is not None,
    )


def saved_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """Fields of a dataclass that are saved: not those derived from others."""
    return [field for field in dataclasses.fields(kind) if field.init and field.compare]


def to_json_value(value: Any) -> Any:
    """Convert to JSON types; `trace_from` and `from_json_value` read it back."""
    if isinstance(value, Intervention):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json_value(getattr(value, f.name)) for f in saved_fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and value:
            return {key: to_json_value(item) for key, item in value.items()}
        return [[key, to_json_value(item)] for key, item in value.items()]  # JSON keys are strings
    if isinstance(value, bytes | tuple | list):
        return [to_json_value(item) for item in value]
    return value


def from_json_value(kind: type[Value], data: Any) -> Value:
    """Return the value of a saved class that `to_json_value` converted."""
    key: Any = kind
    value: Value = _adapter_of(key).validate_python(data)
    return value


_MAX_FILE_BYTES = 256 << 20  # bytes of a file; a step with full detail takes about 3 kB
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}  # not in JSON


def _parse_non_finite(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


_Int = Annotated[int, Strict()]
_Count = Annotated[_Int, Field(ge=0, le=2**63 - 1)]
_Size = Annotated[_Int, Field(ge=0, le=1_000_000)]
_Token = Annotated[_Int, Field(ge=0, le=10_000_000)]
_Byte = Annotated[_Int, Field(ge=0, le=255)]
_Real = Annotated[float, Strict(), BeforeValidator(_parse_non_finite)]
# Sums of float32 values do not overflow.
_Finite = Annotated[float, Strict(), Field(ge=-1e39, le=1e39, allow_inf_nan=False)]

# Type -> type that validates it.
_VALIDATORS: dict[Any, Any] = {
    float: _Real,
    bool: Annotated[bool, Strict()],
    str: Annotated[str, Strict(), Field(max_length=1_000_000)],
}
# Class -> type of its integers; `_Count` for others.
_INT_TYPES: dict[Any, Any] = dict.fromkeys((GuardPolicy, *GUARD_NAMES), _Size)
_INT_TYPES[SamplingSettings] = Annotated[_Int, Field(ge=-1, le=1_000_000_000)]
# Class -> fields with narrower types, or with another representation.
_FIELD_TYPES: dict[Any, dict[str, Any]] = {
    Trace: {
        "prompt": tuple[_Token, ...],
        "interventions": tuple[Annotated[Any, AfterValidator(Intervention.from_dict)], ...],
    },
    Candidate: {"token": _Token, "probability": Annotated[_Finite, Field(ge=0, le=1)]},
    StageReport: {"top": tuple[tuple[_Token, _Real], ...]},
    Limits: {"context": Annotated[_Count, Field(ge=1)], "end_ids": frozenset[_Token]},
    SamplingSettings: {
        "seed": _Int,
        "stages": tuple[Annotated[str, Strict()], ...],  # a caller's function cannot be saved
        "dry_breakers": tuple[tuple[_Token, ...], ...],
        "logit_bias": Annotated[list[tuple[_Token, _Real]], AfterValidator(dict)],
    },
    Step: {
        "token": _Token,
        "bytes": Annotated[list[_Byte], AfterValidator(bytes)],
        # A person may have chosen an impossible token.
        "logprob": Annotated[Literal["-inf"], AfterValidator(float)] | _Finite,
        "entropy": _Finite | None,
        "seconds": _Finite,
        "probability": Annotated[_Finite, Field(gt=0, le=1)] | None,  # a picked token has p > 0
        "draft": Literal["accepted", "rejected"] | None,
    },
}


# Class -> fields that older files lack, and their defaults.
_ADDED_FIELDS: dict[Any, dict[str, Any]] = {
    Limits: {"endless": None},
    Trace: {"thoughts": "", "think_budget": None, "interventions": ()},
}


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace to a file, atomically."""
    target = Path(path).expanduser()
    content = json.dumps(trace.to_dict(), allow_nan=False, separators=(",", ":"))
    try:
        target = target.resolve()  # a link stays a link
        if target.exists() and not target.is_file():
            raise UnspoolError(f"{path} is not a regular file")
        temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            temporary.write_text(content + "\n", encoding="utf-8")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UnspoolError(f"{path} cannot be written: {error.strerror or error}") from error


@cache
def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_validator(kind))


@cache
def _trace_adapter() -> TypeAdapter[Trace]:
    guard_types = [Annotated[_validator(kind), Tag(name)] for kind, name in GUARD_NAMES.items()]
    guard: Any = reduce(operator.or_, guard_types)
    kind = Discriminator(lambda value: value.get("kind") if isinstance(value, dict) else None)
    _FIELD_TYPES[GuardPolicy] = {"guards": tuple[Annotated[guard, kind], ...]}
    return TypeAdapter(_validator(Trace))


def _validator(kind: Any, int_type: Any = _Count) -> Any:
    """Type that validates values of `kind`; `int_type`: type of its integers."""
    if dataclasses.is_dataclass(kind):
        hints, special, int_type = (
            get_type_hints(kind),
            _FIELD_TYPES.get(kind, {}),
            _INT_TYPES.get(kind, int_type),
        )
        names, defaults = [field.name for field in saved_fields(kind)], _ADDED_FIELDS.get(kind, {})
        fields: dict[str, Any] = {
            name: (special.get(name) or _validator(hints[name], int_type), defaults.get(name, ...))
            for name in names
        }
        model: Any = create_model(getattr(kind, "__name__", ""), **fields)
        constructor: Any = kind
        return Annotated[model, AfterValidator(lambda fields: constructor(**dict(fields)))]
    if kind is int:
        return int_type
    type_args = get_args(kind)
    if not type_args or get_origin(kind) in (Literal, dict):
        return _VALIDATORS.get(kind, kind)
    type_args = tuple(
        temporary if temporary is ... else _validator(temporary, int_type)
        for temporary in type_args
    )
    return (
        GenericAlias(tuple, type_args)
        if get_origin(kind) is tuple
        else reduce(operator.or_, type_args)
    )


def trace_from(data: Any) -> Trace:
    """Make a trace from the output of `Trace.to_dict`."""
    if not isinstance(data, dict):
        raise UnspoolError("the file is not a JSON object")
    if data.get("format") != FORMAT:
        raise UnspoolError("this is not an Unspool trace")
    if data.get("version") != VERSION or isinstance(data.get("version"), bool):
        version = reprlib.repr(data.get("version"))
        raise UnspoolError(f"its version is {version}; this Unspool reads version {VERSION}")
    try:
        trace = _trace_adapter().validate_python(data)
    except ValidationError as error:
        raise UnspoolError(_first_error(error)) from None
    for number, step in enumerate(trace.steps):
        if step.position != (expected := len(trace.prompt) + number):
            raise UnspoolError(
                f"steps[{number}].position must be {expected}, got {step.position}: steps follow "
                "the prompt, one per token"
            )
    if not trace.prompt:
        raise UnspoolError("its prompt is empty")
    if trace.given > len(trace.steps):
        raise UnspoolError(f"given is {trace.given}, but there are {len(trace.steps)} steps")
    return trace


def _first_error(error: ValidationError) -> str:
    """Location and reason of the first error, in one line."""
    details = error.errors(include_url=False)[0]
    location = "".join(
        f"[{key}]" if isinstance(key, int) else f".{key}" for key in details["loc"]
    ).strip(".")
    if details["type"] == "missing":
        return f"{location} is missing"
    if details["type"] == "string_unicode":
        return f"{location} contains a lone surrogate"
    message = " ".join(details["msg"].replace("Input", "it", 1)[:200].split())
    return f"{location} is {reprlib.repr(details['input'])}; {message}"


def load_trace(path: str | Path) -> Trace:
    """Load a trace. Raises a one-line UnspoolError if the file is not a trace."""
    source = Path(path).expanduser()
    try:
        with source.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise UnspoolError(f"larger than {_MAX_FILE_BYTES >> 20} MB: not a trace")
        return trace_from(json.loads(content.decode("utf-8"), parse_constant=_reject_constant))
    except OSError as error:
        raise UnspoolError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnspoolError as error:
        raise UnspoolError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too deep, a giant number
        raise UnspoolError(f"{path}: is not JSON: {str(error).splitlines()[0]}") from None


def _reject_constant(name: str) -> Any:
    raise UnspoolError(f"{name} is not valid JSON")
