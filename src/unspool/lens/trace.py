"""A generation in a file: everything that led to it, so that it can be shown and written again.

    save_trace(trace_of(lm, generation), "leaves.json")
    trace = load_trace("leaves.json")

The file is JSON. Numbers are written so that they come back bit for bit. Whatever a file holds,
reading it gives a `Trace` or one line that says what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.engine.ending import Limits
from unspool.engine.generation import Generation
from unspool.engine.steps import Candidate, Step
from unspool.errors import UnspoolError
from unspool.lens import parsing as p
from unspool.sampling import Draw, GrammarSpec, SamplingSettings, StageReport
from unspool.sampling.guards import BannedGuard, GuardPolicy, LoopGuard, SurpriseGuard
from unspool.session import LanguageModel

FORMAT = "unspool-trace"
VERSION = 1
_LARGEST = 256 << 20  # bytes of a file; a step with all its detail takes about three thousand


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Which model it was."""

    name: str
    config: dict[str, Any]
    precision: str
    weights: str  # a hash of some of the weights

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
    limits: Limits | None  # None: it was not written token by token (a beam, for example)
    steps: tuple[Step, ...]
    given: int = 0  # steps that stood there when writing went on, or that a person chose
    empty_reason: str | None = None  # why there is not a single step
    grammar: GrammarSpec | None = None  # what the text had to be
    guards: GuardPolicy | None = None  # what was watched for
    guarded: bool = False  # guards watched, even if they were a caller's own, which no file holds

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def tokens(self) -> list[int]:
        return [step.token for step in self.steps]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `trace_from` reads it."""
        listed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found = {"format": FORMAT, "version": VERSION, "text": self.text, **_plain(listed)}
        found["model"]["config"] = self.model.config
        if self.guards is not None:
            for guard, told in zip(self.guards.guards, found["guards"]["guards"], strict=True):
                told["kind"] = _GUARD_NAMES[type(guard)]
        return found


def fingerprint(lm: LanguageModel) -> Fingerprint:
    config = json.loads(json.dumps(lm.config.to_dict()))  # as it comes out of a file
    name = lm.path.name if lm.path else lm.config.family
    return Fingerprint(name, config, lm.model.precision, lm.model.fingerprint())


def trace_of(lm: LanguageModel, generation: Generation) -> Trace:
    """Everything about a generation; ask for it with `explain` and `top` to have the detail."""
    request, steps = generation.request, generation.steps
    chosen = [number for number, step in enumerate(steps, start=1) if step.chosen]
    before = len(request.written) if request is not None else len(steps)
    grammar, guards = getattr(request, "grammar", None), getattr(request, "guards", None)
    savable = guards is not None and all(type(guard) in _GUARD_NAMES for guard in guards.guards)
    return Trace(
        model=fingerprint(lm),
        prompt=tuple(generation.prompt),
        settings=generation.settings,
        limits=request.limits if request is not None else None,
        steps=tuple(steps),
        given=min(len(steps), max([before, *chosen])),
        empty_reason=generation.empty_reason,
        grammar=getattr(grammar, "spec", None),
        guards=guards if savable else None,
        guarded=guards is not None,
    )


# -- writing ---------------------------------------------------------------------------------


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


def _plain(value: Any) -> Any:
    """A value as JSON can say it; `_TRACE` below reads it back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
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


# -- reading ---------------------------------------------------------------------------------

_TOKEN = p.whole(0, 10_000_000)
_COUNT = p.whole(0, 1_000_000_000)
_REAL = p.number()
_TEXT = p.text()

_FINITE = p.number(-1e39, 1e39)  # what a float32 can hold: sums of these do not overflow


def _logprob(value: Any, where: str) -> float:
    """A person may have chosen what the model thought impossible."""
    return -math.inf if value == "-inf" else _FINITE(value, where)


_STEP = p.record(
    Step,
    token=_TOKEN,
    bytes=p.octets,
    text=_TEXT,
    logprob=_logprob,
    rank=_COUNT,
    entropy=_FINITE,
    probability=p.number(0, 1, above=True),  # what was picked was possible
    position=_COUNT,
    draw=p.optional(p.record(Draw, u=_REAL, low=_REAL, high=_REAL)),
    candidates=p.many(
        p.record(Candidate, token=_TOKEN, text=_TEXT, logprob=_REAL, probability=p.number(0, 1))
    ),
    stages=p.many(
        p.record(
            StageReport,
            name=_TEXT,
            kept=_COUNT,
            removed=_COUNT,
            kept_mass=_REAL,
            changed=_COUNT,
            top=p.many(p.pair(_TOKEN, _REAL)),
        )
    ),
    seconds=_FINITE,
    finish_reason=p.optional(_TEXT),
    draft=p.optional(p.one_of("accepted", "rejected")),
    retracts=_COUNT,
    chosen=p.flag,
)

_WHOLE_SETTINGS = ("top_k", "penalty_window", "no_repeat_ngram", "dry_allowed_length", "dry_window")
_SETTINGS = {
    # The settings check themselves; here it is only made sure that they get what they can check.
    **{field.name: _REAL for field in dataclasses.fields(SamplingSettings)},
    **{name: p.whole(-1, 1_000_000_000) for name in _WHOLE_SETTINGS},
    "seed": p.whole(None, None),
    "penalize_prompt": p.flag,
    "dry_breakers": p.many(p.many(_TOKEN, 1000), 10_000),
    "logit_bias": p.many(p.pair(_TOKEN, _REAL), 1_000_000),
    "stages": p.many(p.text(100), 1000),
}


def _settings(value: Any, where: str) -> SamplingSettings:
    found = p.fields(value, where, _SETTINGS)
    found["logit_bias"] = dict(found["logit_bias"])
    return SamplingSettings(**found)


_LIMITS = p.record(
    Limits,
    max_tokens=_COUNT,
    context=p.whole(1, 1_000_000_000),
    end_ids=lambda ids, where: frozenset(p.many(_TOKEN)(ids, where)),
    stop=p.many(p.text(10_000), 1000),
    sample=p.whole(),
    top=_COUNT,
    explain=p.flag,
)
_NAMED = {"name": p.text(1000)}
_SIZE = p.whole(0, 1_000_000)
_GUARDS: dict[str, p.Parser[Any]] = {
    "loop": p.record(
        LoopGuard,
        repeats=_SIZE,
        min_tokens=_SIZE,
        min_words=_SIZE,
        keep=_SIZE,
        longest=_SIZE,
        words=p.flag,
        **_NAMED,
    ),
    "ban": p.record(
        BannedGuard,
        words=p.many(p.text(10_000), 100_000),
        patterns=p.many(p.text(10_000), 1000),
        ignore_case=p.flag,
        whole_words=p.flag,
        window=_SIZE,
        **_NAMED,
    ),
    "surprise": p.record(
        SurpriseGuard,
        spike=p.optional(_FINITE),
        mean=p.optional(_FINITE),
        window=_SIZE,
        beyond_entropy=p.flag,
        **_NAMED,
    ),
}
_GUARD_NAMES: dict[type, str] = {LoopGuard: "loop", BannedGuard: "ban", SurpriseGuard: "surprise"}


def _guard(value: Any, where: str) -> Any:
    kind = p.fields(value, where, {"kind": p.one_of(*_GUARDS)})["kind"]
    return _GUARDS[kind](value, where)


_TRACE = p.record(
    Trace,
    model=p.record(
        Fingerprint, name=_TEXT, config=p.mapping, precision=_TEXT, weights=p.text(1000)
    ),
    prompt=p.many(_TOKEN),
    settings=_settings,
    limits=p.optional(_LIMITS),
    steps=p.many(_STEP),
    given=_COUNT,
    empty_reason=p.optional(_TEXT),
    grammar=p.optional(p.record(GrammarSpec, kind=_TEXT, source=_TEXT)),
    guards=p.optional(
        p.record(
            GuardPolicy,
            guards=p.many(_guard, 1000),
            action=_TEXT,
            retries=_SIZE,
            exhausted=_TEXT,
        )
    ),
    guarded=p.flag,
)


def trace_from(data: Any) -> Trace:
    """A trace from what `Trace.to_dict` gave."""
    given = p.mapping(data, "the file")
    if given.get("format") != FORMAT:
        raise UnspoolError("this is no trace of Unspool")
    if given.get("version") != VERSION or isinstance(given.get("version"), bool):
        version = reprlib.repr(given.get("version"))
        raise UnspoolError(f"its version is {version}; this Unspool reads version {VERSION}")
    trace = _TRACE(data, "")
    for number, step in enumerate(trace.steps):
        if step.position != len(trace.prompt) + number:
            wanted = f"{len(trace.prompt) + number}: steps follow the prompt, one a token"
            raise p.refuse(step.position, f"steps[{number}].position", wanted)
    if not trace.prompt:
        raise UnspoolError("its prompt is empty")
    if trace.given > len(trace.steps):
        raise p.refuse(trace.given, "given", f"at most the number of steps, {len(trace.steps)}")
    return trace


def load_trace(path: str | Path) -> Trace:
    """Read a trace; `UnspoolError`, in one line, if the file is not one."""
    source = Path(path).expanduser()
    try:
        with source.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UnspoolError(f"{path}: has more than {_LARGEST >> 20} MB; this is no trace")
        data = json.loads(content.decode("utf-8"), parse_constant=_no_constant)
        return trace_from(data)
    except OSError as error:
        raise UnspoolError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnspoolError as error:
        raise UnspoolError(f"{path}: {error}") from None
    except UnicodeDecodeError:
        raise UnspoolError(f"{path}: is not UTF-8 text; this is no trace") from None
    except (ValueError, RecursionError) as error:  # not JSON, nested too deep, a giant number
        raise UnspoolError(f"{path}: is not JSON: {str(error).splitlines()[0]}") from None


def _no_constant(name: str) -> Any:
    raise UnspoolError(f"{name} is no number in JSON")
