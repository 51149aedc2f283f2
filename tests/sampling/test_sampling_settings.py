"""What may be set, and the one line that says so."""

from __future__ import annotations

import math
from typing import Any

import pytest

from unspool.errors import SettingsError
from unspool.sampling import DEFAULT_STAGES, SamplingSettings
from unspool.sampling.settings import MIROSTAT_STAGES

BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
    ("temperature", True), ("temperature", "hot"), ("temperature", None),
    ("top_p", 1.01), ("top_p", -0.1), ("top_p", math.nan), ("min_p", 1.05), ("min_p", -1),
    ("typical_p", 0.0), ("typical_p", 2), ("eta", -1e-3), ("eta", 1.5), ("top_n_sigma", -1),
    ("xtc_probability", 1.1), ("xtc_threshold", -0.1), ("repetition_penalty", 0),
    ("repetition_penalty", -1), ("frequency_penalty", math.inf), ("presence_penalty", math.nan),
    ("top_k", -1), ("top_k", 1.5), ("top_k", True), ("penalty_window", -2),
    ("no_repeat_ngram", -1), ("dry_multiplier", -1), ("dry_base", 0.5),
    ("dry_allowed_length", 0), ("dry_window", -5), ("dry_breakers", "abc"),
    ("dry_breakers", [()]), ("dry_breakers", [("a",)]), ("dry_breakers", 7),
    ("logit_bias", [1]), ("logit_bias", {"1": 2.0}), ("logit_bias", {-1: 2.0}),
    ("logit_bias", {1: math.nan}), ("logit_bias", {True: 1.0}), ("dynatemp_range", -1),
    ("dynatemp_exponent", -1), ("mirostat_tau", -1), ("mirostat_eta", math.nan),
    ("seed", 1.0), ("seed", "7"), ("stages", "top_k"), ("stages", 3),
    ("stages", ("top_k", "top_k")), ("stages", (5,)), ("penalize_prompt", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refused_in_one_line_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        SamplingSettings.from_options(**{name: value})
    text = str(caught.value)
    assert "\n" not in text
    assert name in text or (name == "stages" and "stage" in text)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"'temprature'.*'temperature'"):
        SamplingSettings.from_options(temprature=1)
    with pytest.raises(SettingsError, match=r"'topp'.*'top_p'"):
        SamplingSettings(stages=("topp",))
    with pytest.raises(SettingsError, match="allowed: "):
        SamplingSettings.from_options(zzzzzzzz=1)


def test_a_setting_without_its_stage_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"min_p is 0.2.*'min_p'"):
        SamplingSettings(min_p=0.2, stages=("top_k",))
    with pytest.raises(SettingsError, match="temperature is 0"):
        SamplingSettings(temperature=0, stages=("top_k",))
    with pytest.raises(SettingsError, match="top_k is 40"):  # given, though the default's value
        SamplingSettings.from_options(top_k=40, stages=("temperature",))
    SamplingSettings.from_options(top_k=0, stages=("temperature",))  # off: nothing is lost
    SamplingSettings(stages=("top-k", "temperature"))  # defaults, not set by the user


def test_edges_that_are_allowed() -> None:
    SamplingSettings(temperature=0, top_p=0, min_p=1, top_k=10**9, seed=-(10**40))
    SamplingSettings(logit_bias={1: -math.inf, 2: math.inf, 3: -100})
    assert SamplingSettings(dry_multiplier=1, dry_breakers=(4, [5, 6])).dry_breakers == (
        (4,),
        (5, 6),
    )
    assert SamplingSettings(stages=["top-k", "temperature"]).stages == (  # type: ignore[arg-type]
        "top_k",
        "temperature",
    )


def test_mirostat_replaces_the_other_truncations() -> None:
    assert SamplingSettings().stages == DEFAULT_STAGES
    assert SamplingSettings(mirostat_tau=5).stages == MIROSTAT_STAGES
    with pytest.raises(SettingsError, match="top_p"):
        SamplingSettings(mirostat_tau=5, top_p=0.5)
    combined = SamplingSettings(mirostat_tau=5, top_p=0.5, stages=("top_p", "mirostat"))
    assert combined.stages == ("top_p", "mirostat")
