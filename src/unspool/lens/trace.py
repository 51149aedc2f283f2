"""Everything that led to a generation, so that it can be shown and written again.

`trace_file` saves it and reads it back.
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
    """Which model it was."""

    name: str
    config: dict[str, Any]
    precision: str
    weights: str  # a hash of some of the weights

    def __repr__(self) -> str:
        return f"<Fingerprint {self.name}, {self.precision}, {self.weights[:12]}>"

    def differs_from(self, other: Fingerprint) -> str | None:
        """In what the other model is another one, in words; None if it is the same."""
        for name in sorted(self.config.keys() | other.config.keys()):
            mine, theirs = self.config.get(name), other.config.get(name)
            if mine != theirs:
                return f"its {name} is {reprlib.repr(mine)}, and was {reprlib.repr(theirs)}"
        if self.precision != other.precision:
            return f"its weights are in {self.precision}, and were in {other.precision}"
        return None if self.weights == other.weights else "its weights are others"


@dataclass(frozen=True, slots=True)
class Trace:
    """A generation as it was, and how it was asked for."""

    model: Fingerprint
    prompt: tuple[int, ...]
    settings: SamplingSettings
    limits: Limits | None  # None: nobody can write it again (a caller's own stage picked it)
    steps: tuple[Step, ...]
    given: int = 0  # steps that stood there when writing went on, or that a person chose
    empty_reason: str | None = None  # why there is not a single step
    grammar: GrammarSpec | None = None  # what the text had to be
    guards: GuardPolicy | None = None  # what was watched for
    thoughts: str = ""  # "answer" or "call", where thoughts are told apart from that
    think_budget: int | None = None  # tokens of thought
    guarded: bool = False  # guards watched, even if they were a caller's own, which no file holds

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
        listed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found = {"format": FORMAT, "version": VERSION, "text": self.text, **_plain(listed)}
        found["model"]["config"] = self.model.config
        if self.guards is not None:
            for guard, saved in zip(self.guards.guards, found["guards"]["guards"], strict=True):
                saved["kind"] = GUARD_NAMES[type(guard)]
        return found


def fingerprint(lm: Session) -> Fingerprint:
    config = json.loads(json.dumps(lm.config.to_dict()))  # as it comes out of a file
    name = lm.path.name if lm.path else lm.config.family
    return Fingerprint(name, config, lm.model.precision, lm.model.fingerprint())


def trace_of(lm: Session, generation: Generation) -> Trace:
    """Everything about a generation; ask for it with `explain` and `top` to have the detail."""
    check_generation(generation)
    request, steps, thinking = generation.request, generation.steps, generation.request.thinking
    if request.adapter is not None:
        raise SettingsError(
            f"the text was written with the adapter {request.adapter!r}, which a trace does not "
            "hold; merge it into the model (unspool train merge) and write with that"
        )
    chosen = [number for number, step in enumerate(steps, start=1) if step.chosen]
    guards = request.guards
    savable = guards is not None and all(type(guard) in GUARD_NAMES for guard in guards.guards)
    stages = tuple(stage for stage in request.settings.stages if isinstance(stage, str))
    own_stage = len(stages) < len(request.settings.stages)
    return Trace(
        model=fingerprint(lm),
        prompt=tuple(generation.prompt),
        settings=replace(generation.settings, stages=stages) if own_stage else generation.settings,
        limits=None if own_stage else request.limits,
        steps=tuple(steps),
        given=min(len(steps), max([len(request.written), *chosen])),
        empty_reason=generation.empty_reason,
        grammar=request.grammar.spec if request.grammar is not None else None,
        thoughts="" if thinking is None else "call" if thinking.is_call else "answer",
        think_budget=None if thinking is None else thinking.budget,
        guards=guards if savable else None,
        guarded=guards is not None,
    )


def saved_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """Without those that follow from others."""
    return [each for each in dataclasses.fields(kind) if each.init and each.compare]


def _plain(value: Any) -> Any:
    """A value as JSON can say it; `trace_from` reads it back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in saved_fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and value:
            return {key: _plain(item) for key, item in value.items()}
        return [[key, _plain(item)] for key, item in value.items()]  # JSON's keys are text
    if isinstance(value, bytes | tuple | list):
        return [_plain(item) for item in value]
    return value
