"""How one request wants its tokens picked: every setting, what it may be, and the stages' order.

A setting at its neutral value (`top_k=0`, `top_p=1`, ...) does nothing, wherever its stage stands.

The default order is llama.cpp's. What edits single tokens (penalties, bans, bias) comes first.
Then come the stages that truncate: they judge the model's own distribution. Temperature is last,
so that raising it spreads the choice among good candidates, and never lets bad ones back in.
(transformers applies temperature first; `stages=` gives that order.) With mirostat on and no
`stages` given, it replaces the other truncations, as in llama.cpp.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unspool.errors import SettingsError
from unspool.sampling.own_stage import OwnStage

EDITING_STAGES = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "no_repeat_ngram",
    "dry",
    "logit_bias",
)
"""The stages that act on single tokens; greedy picking uses these alone."""

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
"""Every stage, and the settings that only it reads. The first one turns the stage on."""

_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "typical_p": 1.0,
    "top_p": 1.0,
    "temperature": 1.0,
}  # every other stage is off at 0

# (least, most, is the least itself allowed); None: no limit
_NUMBERS: dict[str, tuple[float | None, float | None, bool]] = {
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
_WHOLE: dict[str, int | None] = {  # the least; None: any
    "top_k": 0,
    "penalty_window": -1,
    "no_repeat_ngram": 0,
    "dry_allowed_length": 1,
    "dry_window": -1,
    "seed": None,
}


@dataclass(frozen=True)
class SamplingSettings:
    """One request's sampling settings; checked when made, never changed after.

    Penalties, n-gram bans and DRY look at the prompt too, as in transformers and llama.cpp;
    `penalize_prompt=False` makes the three penalties count the generated tokens alone.
    """

    temperature: float = 0.8  # 0: greedy, the likeliest token after penalties and bias
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # the fewest candidates whose mass reaches this; 1: off
    min_p: float = 0.05  # at least this share of the likeliest candidate's probability; 0: off
    typical_p: float = 1.0  # this much mass, most typical (surprise nearest entropy) first; 1: off
    eta: float = 0.0  # the epsilon of eta sampling; 0: off
    top_n_sigma: float = 0.0  # within this many standard deviations of the best logit; 0: off
    xtc_probability: float = 0.0  # how often to exclude top choices; 0: off
    xtc_threshold: float = 0.1  # from which probability on a candidate is a top choice
    repetition_penalty: float = 1.0  # divides the logit of a token that occurred; 1: off
    frequency_penalty: float = 0.0  # subtracted for every occurrence
    presence_penalty: float = 0.0  # subtracted once
    penalty_window: int = -1  # how many last tokens the penalties see; -1: all, 0: none
    penalize_prompt: bool = True  # whether the prompt is among them
    no_repeat_ngram: int = 0  # no run of this many tokens occurs twice; 0: off
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # repeats shorter than this are free
    dry_window: int = -1  # how many last tokens DRY sees; -1: all
    dry_breakers: tuple[tuple[int, ...], ...] = ()  # token runs that no repeat reaches across
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # -inf bans, +inf: only these
    dynatemp_range: float = 0.0  # temperature ± this, by how unsure the model is; 0: off
    dynatemp_exponent: float = 1.0
    mirostat_tau: float = 0.0  # the surprise aimed at, in bits (mirostat v2); 0: off
    mirostat_eta: float = 0.1  # how fast it is corrected
    seed: int = 0  # any int; sets every draw together with sample number and position
    stages: tuple[str | OwnStage, ...] = DEFAULT_STAGES  # given as names, functions, and `...`

    def __post_init__(self) -> None:
        for name, (least, most, included) in _NUMBERS.items():
            self._set(name, _number(name, getattr(self, name), least, most, included))
        for name, smallest in _WHOLE.items():
            _whole(name, getattr(self, name), smallest)
        if not isinstance(self.penalize_prompt, bool):
            raise SettingsError(
                f"penalize_prompt was {self.penalize_prompt!r}; it may be True or False"
            )
        self._set("dry_breakers", _breakers(self.dry_breakers))
        self._set("logit_bias", _bias(self.logit_bias))
        usual = MIROSTAT_STAGES if self.mirostat_tau > 0 else DEFAULT_STAGES
        stages = _stages(self.stages, usual)
        self._set("stages", usual if stages == DEFAULT_STAGES else stages)
        changed = [name for name in _DEFAULTS if getattr(self, name) != _DEFAULTS[name]]
        self._require_stages(changed)

    def __repr__(self) -> str:
        """Only what is not at its usual value."""
        own = {**_DEFAULTS, "seed": 0, "stages": DEFAULT_STAGES}
        told = {name: getattr(self, name) for name in _FIELDS if getattr(self, name) != own[name]}
        return f"SamplingSettings({', '.join(f'{n}={value!r}' for n, value in told.items())})"

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _require_stages(self, given: Iterable[str]) -> None:
        """A setting that was given must have its stage in the chain, or it would be ignored."""
        names = set(given)
        for stage, owned in STAGE_SETTINGS.items():
            lost = sorted(names.intersection(owned))
            if stage not in self.stages and lost and not self.is_neutral(stage):
                raise SettingsError(
                    f"{lost[0]} was {getattr(self, lost[0])!r}, but stages does not name its stage"
                    f" {stage!r}; add it there, or leave {lost[0]} out"
                )

    @classmethod
    def from_options(cls, **options: Any) -> SamplingSettings:
        """Settings from a user's named options; an unknown one is refused with the nearest name."""
        for name in options:
            if name not in _FIELDS:
                raise SettingsError(f"unknown sampling option {name!r}{_nearest(name, _FIELDS)}")
        settings = cls(**options)
        settings._require_stages(options)
        return settings

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    def is_neutral(self, stage: str | OwnStage) -> bool:
        """Whether the stage has nothing to do at these settings."""
        if isinstance(stage, OwnStage):
            return False
        switch = STAGE_SETTINGS[stage][0]
        if stage == "temperature" and self.dynatemp_range > 0 and not self.greedy:
            return "dynamic_temperature" in self.stages  # which then scales in its place
        return bool(getattr(self, switch) == _NEUTRAL.get(switch, 0))


_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingSettings))
_DEFAULTS: dict[str, Any] = {
    f.name: {} if f.name == "logit_bias" else f.default
    for f in dataclasses.fields(SamplingSettings)
    if f.name not in ("stages", "seed")
}


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; it may be one of {', '.join(names)}"


def _number(
    name: str, value: Any, least: float | None, most: float | None, included: bool
) -> float:
    if most is not None:
        allowed = f"a number from {least} to {most}" + ("" if included else f", not {least}")
    elif least is not None:
        allowed = f"a number of {least} or more" if included else f"a number above {least}"
    else:
        allowed = "any finite number"
    fits = _is_number(value) and math.isfinite(value)
    if fits and least is not None:
        fits = value >= least if included else value > least
    if fits and most is not None:
        fits = value <= most
    if not fits:
        raise SettingsError(f"{name} was {value!r}; it may be {allowed}")
    return float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:  # numpy's numbers too, but not text
        return not isinstance(value, str | bytes) and float(value) is not None
    except (TypeError, ValueError, OverflowError):
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(name: str, value: Any, least: int | None) -> None:
    if not _is_whole(value) or (least is not None and value < least):
        allowed = "any whole number" if least is None else f"a whole number of {least} or more"
        raise SettingsError(f"{name} was {value!r}; it may be {allowed}")


def _breakers(value: Any) -> tuple[tuple[int, ...], ...]:
    allowed = "token ids, and runs of token ids"
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise SettingsError(f"dry_breakers was {value!r}; it may hold {allowed}")
    runs: list[tuple[int, ...]] = []
    for item in value:
        whole = _is_whole(item)
        run = (item,) if whole else tuple(item) if isinstance(item, tuple | list) else ()
        if not run or not all(_is_whole(token) and token >= 0 for token in run):
            raise SettingsError(f"dry_breakers held {item!r}; it may hold {allowed}")
        runs.append(run)
    return tuple(runs)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise SettingsError(f"logit_bias was {value!r}; it may map token ids to numbers")
    for token, amount in value.items():
        if not _is_whole(token) or token < 0:
            raise SettingsError(f"logit_bias named token {token!r}; it may be a token id")
        if not _is_number(amount) or math.isnan(amount):
            raise SettingsError(
                f"logit_bias of token {token} was {amount!r}; it may be a number, -inf or +inf"
            )
    return {token: float(amount) for token, amount in value.items()}


def _stages(value: Any, usual: tuple[str, ...]) -> tuple[str | OwnStage, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SettingsError(
            f"stages was {value!r}; it may be a list of functions, `...` for the usual stages, and "
            + ", ".join(STAGE_SETTINGS)
        )
    stages: list[str | OwnStage] = []
    for item in value:
        found = usual if item is ... else (_stage(item),)
        for stage in found:
            if stage in stages:
                raise SettingsError(f"stages names {stage!r} twice; each may stand once")
            stages.append(stage)
    return tuple(stages)


def _stage(item: Any) -> str | OwnStage:
    if isinstance(item, OwnStage):
        return item
    if callable(item):
        return OwnStage(item)
    name = item.replace("-", "_") if isinstance(item, str) else item
    if name not in STAGE_SETTINGS:
        raise SettingsError(f"unknown stage {item!r}{_nearest(str(item), STAGE_SETTINGS)}")
    return str(name)
