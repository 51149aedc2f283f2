"""Traces: everything that led to a generation, so that it can be shown and replayed.

`save_trace` and `load_trace` write and read files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unspool.engine.ending import Limits
from unspool.engine.generation import Generation, check_generation
from unspool.engine.steps import Step, brief
from unspool.errors import SettingsError, count
from unspool.sampling import GrammarSpec, SamplingSettings
from unspool.sampling.guards import BannedGuard, GuardPolicy, LoopGuard, SurpriseGuard
from unspool.session import Session

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

    model: Fingerprint
    prompt: tuple[int, ...]
    settings: SamplingSettings
    limits: Limits | None  # None: cannot be generated again (a caller's stage was used)
    steps: tuple[Step, ...]
    given: int = 0  # number of first steps that were not generated, or chosen by a person
    empty_reason: str | None = None  # why there are no steps
    grammar: GrammarSpec | None = None  # constraint of the text
    guards: GuardPolicy | None = None
    thoughts: str = ""  # "answer" or "call" if reasoning is separated from it
    think_budget: int | None = None  # reasoning tokens
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
        """For JSON; `trace_file.trace_from` reads it."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data = {"format": FORMAT, "version": VERSION, "text": self.text, **_to_json(fields)}
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
        guards=guards if can_save else None,
        guarded=guards is not None,
    )


def saved_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """Fields of a dataclass that are saved: not those derived from others."""
    return [field for field in dataclasses.fields(kind) if field.init and field.compare]


def _to_json(value: Any) -> Any:
    """Convert to JSON types; `trace_from` reads it back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _to_json(getattr(value, f.name)) for f in saved_fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and value:
            return {key: _to_json(item) for key, item in value.items()}
        return [[key, _to_json(item)] for key, item in value.items()]  # JSON keys are strings
    if isinstance(value, bytes | tuple | list):
        return [_to_json(item) for item in value]
    return value
