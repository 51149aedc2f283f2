"""Sampling settings of a request: their allowed values, and the order of the stages.

A setting at its neutral value (`top_k=0`, `top_p=1`, ...) has no effect.

The default order is that of llama.cpp. Stages that edit single tokens (penalties, bans, bias) come
first, then those that truncate the model's distribution. Temperature is last, so that raising it
spreads the choice among good candidates and never brings bad ones back. (transformers applies
temperature first; pass `stages=` for that order.) With mirostat and no `stages`, it replaces the
other truncations, as in llama.cpp.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool.errors import SettingsError
from unspool.sampling.candidates import INF, Candidates, StageError

StageFunction = Callable[[npt.NDArray[np.int64], npt.NDArray[np.float64]], npt.ArrayLike]
"""Maps the token ids so far (prompt first) and the logits of the vocabulary to new logits."""


class _Histories(Protocol):
    """The part of `Rows` that is used here."""

    @property
    def histories(self) -> Sequence[npt.NDArray[np.int64]]: ...


class CustomStage:
    """A caller's function as a stage. Pickling keeps only its name."""

    def __init__(self, function: StageFunction | None, name: str | None = None) -> None:
        self.function = function
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))

    def __repr__(self) -> str:
        return f"<stage {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return CustomStage, (None, self.name)

    def apply(self, candidates: Candidates, rows: _Histories) -> Candidates:
        """Call the function for each row."""
        host = candidates.ops.to_numpy
        logits = host(candidates.logits).astype(np.float64)
        ids = None if candidates.ids is None else host(candidates.ids)
        for row, history in enumerate(rows.histories):
            mask = logits[row] > -INF
            tokens = mask.nonzero()[0] if ids is None else ids[row][mask]
            full_logits = np.full(candidates.vocabulary, -INF)
            full_logits[tokens] = logits[row][mask]
            logits[row][mask] = self._call(history.copy(), full_logits, row)[tokens]
        return candidates.with_logits(candidates.ops.to_array_like(logits, candidates.logits))

    def _call(
        self, history: npt.NDArray[np.int64], logits: npt.NDArray[np.float64], row: int
    ) -> npt.NDArray[np.float64]:
        if self.function is None:
            raise StageError(
                f"the stage {self.name!r} was a function, which is not pickled: pass stages again",
                [row],
            )
        size = len(logits)
        try:
            new_logits = np.asarray(self.function(history, logits), np.float64)
        except Exception as error:
            raise StageError(
                f"the stage {self.name!r} raised {type(error).__name__}: {error}", [row]
            ) from error
        if new_logits.shape != (size,):
            returned = (
                "nothing" if new_logits.shape == () else f"an array of shape {new_logits.shape}"
            )
            raise StageError(
                f"the stage {self.name!r} returned {returned}; it must return one logit for each "
                f"of the {size} tokens",
                [row],
            )
        if np.isnan(new_logits).any():
            raise StageError(
                f"the stage {self.name!r} returned NaN; use -inf to remove a token", [row]
            )
        return new_logits


EDITING_STAGES = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "no_repeat_ngram",
    "dry",
    "logit_bias",
)
"""Stages that change single tokens; greedy decoding uses only these."""

_TEMPERATURES = ("dynamic_temperature", "temperature")

DEFAULT_STAGES = (
    *EDITING_STAGES,
    "top_n_sigma",
    "top_k",
    "typical_p",
    "eta",
    "top_p",
    "min_p",
    "xtc",
    *_TEMPERATURES,
)
MIROSTAT_STAGES = (*EDITING_STAGES, *_TEMPERATURES, "mirostat")

STAGE_SETTINGS: dict[str, tuple[str, ...]] = {
    "repetition_penalty": ("repetition_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "presence_penalty": ("presence_penalty",),
    "no_repeat_ngram": ("no_repeat_ngram",),
    "dry": ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_window", "dry_breakers"),
    "logit_bias": ("logit_bias",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typical_p": ("typical_p",),
    "eta": ("eta",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability", "xtc_threshold"),
    "temperature": ("temperature",),
    "dynamic_temperature": ("dynatemp_range", "dynatemp_exponent"),
    "mirostat": ("mirostat_tau", "mirostat_eta"),
}
"""All stages, and the settings that only they use. The first one enables the stage."""

_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "typical_p": 1.0,
    "top_p": 1.0,
    "temperature": 1.0,
}  # every other stage is off at 0
_ENABLING_SETTINGS: dict[str, tuple[str, Any]] = {
    stage: (names[0], _NEUTRAL.get(names[0], 0)) for stage, names in STAGE_SETTINGS.items()
}

# (minimum, maximum, whether the minimum is allowed); None: no limit
_FLOAT_RANGES: dict[str, tuple[float | None, float | None, bool]] = {
    "temperature": (0, None, True),
    "top_p": (0, 1, True),
    "min_p": (0, 1, True),
    "typical_p": (0, 1, False),
    "eta": (0, 1, True),
    "top_n_sigma": (0, None, True),
    "xtc_probability": (0, 1, True),
    "xtc_threshold": (0, 1, True),
    "repetition_penalty": (0, None, False),
    "frequency_penalty": (None, None, True),
    "presence_penalty": (None, None, True),
    "dry_multiplier": (0, None, True),
    "dry_base": (1, None, True),
    "dynatemp_range": (0, None, True),
    "dynatemp_exponent": (0, None, True),
    "mirostat_tau": (0, None, True),
    "mirostat_eta": (0, None, True),
}
_INT_MINIMA = {
    "top_k": 0,
    "penalty_window": -1,
    "no_repeat_ngram": 0,
    "dry_allowed_length": 1,
    "dry_window": -1,
}


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings of a request. Validated, immutable.

    Penalties, n-gram bans and DRY include the prompt, as in transformers and llama.cpp; with
    `penalize_prompt=False` the three penalties count generated tokens only.
    """

    temperature: float = 0.8  # 0: greedy, the most likely token after penalties and bias
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # smallest set of tokens whose mass reaches this; 1: off
    min_p: float = 0.05  # minimum probability relative to the most likely token; 0: off
    typical_p: float = 1.0  # mass of tokens with surprisal nearest the entropy; 1: off
    eta: float = 0.0  # epsilon of eta sampling; 0: off
    top_n_sigma: float = 0.0  # standard deviations below the largest logit; 0: off
    xtc_probability: float = 0.0  # probability of excluding top choices; 0: off
    xtc_threshold: float = 0.1  # minimum probability of a top choice
    repetition_penalty: float = 1.0  # divides the logit of a token that occurred; 1: off
    frequency_penalty: float = 0.0  # subtracted for every occurrence
    presence_penalty: float = 0.0  # subtracted once
    penalty_window: int = -1  # number of last tokens that penalties count; -1: all, 0: none
    penalize_prompt: bool = True  # whether the prompt is included
    no_repeat_ngram: int = 0  # size of n-grams that must not repeat; 0: off
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # shorter repeats are not penalized
    dry_window: int = -1  # number of last tokens that DRY considers; -1: all
    dry_breakers: tuple[tuple[int, ...], ...] = ()  # token sequences that end a repeat
    logit_bias: Mapping[int, float] = field(
        default_factory=dict
    )  # -inf: ban; +inf: allow only these
    dynatemp_range: float = 0.0  # temperature ± this, by entropy; 0: off
    dynatemp_exponent: float = 1.0
    mirostat_tau: float = 0.0  # target surprisal in bits (mirostat v2); 0: off
    mirostat_eta: float = 0.1  # learning rate
    seed: int = 0  # any int; with sample and position it determines every draw
    stages: tuple[str | CustomStage, ...] = (
        DEFAULT_STAGES  # names, functions, and `...` for the defaults
    )

    def __post_init__(self) -> None:
        given_values = {
            name: value
            for name, default in _DEFAULTS.items()
            if (value := getattr(self, name)) is not default
        }
        for name, value in given_values.items():
            if name in _FLOAT_RANGES:
                self._set(name, _check_float(name, value, *_FLOAT_RANGES[name]))
            elif name in _INT_MINIMA:
                _check_int(name, value, _INT_MINIMA[name])
        _check_int("seed", self.seed, None)
        if not isinstance(self.penalize_prompt, bool):
            raise SettingsError(
                f"penalize_prompt must be True or False, got {self.penalize_prompt!r}"
            )
        self._set("dry_breakers", _check_breakers(self.dry_breakers))
        self._set("logit_bias", _check_bias(self.logit_bias))
        default_stages = MIROSTAT_STAGES if self.mirostat_tau > 0 else DEFAULT_STAGES
        stages = self.stages
        if stages is not DEFAULT_STAGES:
            stages = _check_stages(stages, default_stages)
        self._set("stages", default_stages if stages == DEFAULT_STAGES else stages)
        self._require_stages(n for n, value in given_values.items() if value != _DEFAULTS[n])

    def __repr__(self) -> str:
        """Only settings that differ from their defaults."""
        defaults = {**_DEFAULTS, "seed": 0, "stages": DEFAULT_STAGES}
        values = {name: getattr(self, name) for name in _FIELDS}
        changed = [f"{n}={value!r}" for n, value in values.items() if value != defaults[n]]
        return f"SamplingSettings({', '.join(changed)})"

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _require_stages(self, set_names: Iterable[str]) -> None:
        """Raise if a setting would be ignored because its stage is not in the chain."""
        names = set(set_names)
        for stage, stage_settings in STAGE_SETTINGS.items():
            if stage in self.stages:
                continue
            ignored = sorted(names.intersection(stage_settings))
            if ignored and not self.is_neutral(stage):
                name = ignored[0]
                raise SettingsError(
                    f"{name} is {getattr(self, name)!r}, but its stage {stage!r} is not in stages;"
                    f" add it, or omit {name}"
                )

    @classmethod
    def from_options(cls, **options: Any) -> SamplingSettings:
        """Make settings from named options; raises for unknown names with a suggestion."""
        for name in options:
            if name not in _FIELDS:
                raise SettingsError(f"unknown sampling option {name!r}{_suggest(name, _FIELDS)}")
        settings = cls(**options)
        settings._require_stages(options)
        return settings

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always picked."""
        return self.temperature == 0

    def is_neutral(self, stage: str | CustomStage) -> bool:
        """Whether the stage has no effect with these settings."""
        if isinstance(stage, CustomStage):
            return False
        if stage == "temperature" and self.dynatemp_range > 0 and not self.greedy:
            return "dynamic_temperature" in self.stages  # replaces it
        setting, neutral = _ENABLING_SETTINGS[stage]
        return bool(getattr(self, setting) == neutral)


_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingSettings))
_DEFAULTS: dict[str, Any] = {
    f.name: {} if f.name == "logit_bias" else f.default
    for f in dataclasses.fields(SamplingSettings)
    if f.name not in ("stages", "seed")
}


def _suggest(name: str, allowed_names: Iterable[str]) -> str:
    names = list(allowed_names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(names)}"


def _check_float(
    name: str, value: Any, minimum: float | None, maximum: float | None, minimum_allowed: bool
) -> float:
    if maximum is not None:
        allowed = f"from {minimum} to {maximum}" + ("" if minimum_allowed else f", not {minimum}")
    elif minimum is not None:
        allowed = f">= {minimum}" if minimum_allowed else f"> {minimum}"
    else:
        allowed = "a finite number"
    is_valid = _is_number(value) and math.isfinite(value)
    if is_valid and minimum is not None:
        is_valid = value >= minimum if minimum_allowed else value > minimum
    if is_valid and maximum is not None:
        is_valid = value <= maximum
    if not is_valid:
        raise SettingsError(f"{name} must be {allowed}, got {value!r}")
    return float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:  # numpy's numbers too, but not strings
        return not isinstance(value, str | bytes) and float(value) is not None
    except (TypeError, ValueError, OverflowError):
        return False


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: Any, minimum: int | None) -> None:
    if not _is_int(value) or (minimum is not None and value < minimum):
        allowed = "an integer" if minimum is None else f"an integer >= {minimum}"
        raise SettingsError(f"{name} must be {allowed}, got {value!r}")


def _check_breakers(value: Any) -> tuple[tuple[int, ...], ...]:
    allowed = "a list of token ids and of sequences of token ids"
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise SettingsError(f"dry_breakers must be {allowed}, got {value!r}")
    breakers: list[tuple[int, ...]] = []
    for item in value:
        if _is_int(item):
            breaker = (item,)
        else:
            breaker = tuple(item) if isinstance(item, tuple | list) else ()
        if not breaker or not all(_is_int(token) and token >= 0 for token in breaker):
            raise SettingsError(f"dry_breakers must be {allowed}, got {item!r} in it")
        breakers.append(breaker)
    return tuple(breakers)


def _check_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise SettingsError(f"logit_bias must map token ids to numbers, got {value!r}")
    for token, amount in value.items():
        if not _is_int(token) or token < 0:
            raise SettingsError(
                f"logit_bias must map token ids to numbers, got the token {token!r}"
            )
        if not _is_number(amount) or math.isnan(amount):
            raise SettingsError(
                f"logit_bias of token {token} must be a number, -inf or +inf, got {amount!r}"
            )
    return {token: float(amount) for token, amount in value.items()}


def _check_stages(value: Any, default_stages: tuple[str, ...]) -> tuple[str | CustomStage, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SettingsError(
            f"stages must be a list of functions, `...` (the default stages) and stage names, got "
            f"{value!r}; stage names: {', '.join(STAGE_SETTINGS)}"
        )
    stages: list[str | CustomStage] = []
    for item in value:
        for stage in default_stages if item is ... else (_check_stage(item),):
            if stage in stages:
                raise SettingsError(f"stages contains {stage!r} twice")
            stages.append(stage)
    return tuple(stages)


def _check_stage(item: Any) -> str | CustomStage:
    if isinstance(item, CustomStage):
        return item
    if callable(item):
        return CustomStage(item)
    name = item.replace("-", "_") if isinstance(item, str) else item
    if name not in STAGE_SETTINGS:
        raise SettingsError(f"unknown stage {item!r}{_suggest(str(item), STAGE_SETTINGS)}")
    return str(name)
