"""Texts that are written with interventions: resumed, forked, sampled, saved and replayed."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.intervention_support import OPS, random_op
from unspool.backends.interventions import (
    Add,
    Function,
    Intervention,
    MeanAblate,
    ProjectOut,
    Replace,
    Scale,
    as_interventions,
    parse_hook_name,
)
from unspool.errors import SettingsError

PROMPT = "The state of the union"
OPTIONS: dict[str, Any] = {"max_tokens": 14, "seed": 3, "temperature": 1.0, "end": False}


@pytest.fixture(scope="module")
def steering(lm: Any) -> list[Intervention]:
    """Enough to change the text of a random model."""
    rng = np.random.default_rng(5)
    width, head_width = lm.config.width, lm.config.head_width
    return [
        Intervention("resid_post", Add(3 * rng.standard_normal(width)), layers=0),
        Intervention("head_out", Scale(0), layers=1, heads=1, positions="generated"),
        Intervention("mlp_out", ProjectOut(rng.standard_normal(width)), positions=slice(4, None)),
        Intervention("head_out", MeanAblate(np.ones(head_width)), 0, "last", heads=(0, 2)),
    ]


def test_every_way_to_the_same_text(lm: Any, steering: list[Intervention]):
    plain = lm.generate(PROMPT, **OPTIONS)
    text = lm.generate(PROMPT, interventions=steering, **OPTIONS)
    assert text.tokens != plain.tokens and text.request.interventions == tuple(steering)
    # Beside others, and from their JSON form.
    as_json = json.loads(json.dumps([item.to_dict() for item in steering]))
    assert lm.generate(PROMPT, interventions=as_json, **OPTIONS).tokens == text.tokens
    batch = lm.generate([PROMPT, PROMPT, "We"], interventions=steering, **OPTIONS)
    assert [item.tokens for item in batch][:2] == [text.tokens] * 2
    assert lm.generate(PROMPT, **OPTIONS).tokens == plain.tokens
    assert lm.generate(PROMPT, cache=False, interventions=steering, **OPTIONS).tokens == text.tokens
    # Resumed, forked, with draft tokens, sampled several times.
    assert text.rewind(5).resume().tokens == text.tokens
    assert text.rewind(5).resume(speculate="lookup").tokens == text.tokens
    samples = lm.samples(PROMPT, 3, interventions=steering, **OPTIONS)
    assert samples[0].tokens == text.tokens and samples[1].tokens != text.tokens
    again = lm.generate(PROMPT, interventions=steering, sample=1, **OPTIONS)
    assert samples[1].tokens == again.tokens
    # Other interventions from here on; None: no more.
    assert text.rewind(0).resume(interventions=None).tokens == plain.tokens
    assert plain.rewind(0).resume(interventions=steering).tokens == text.tokens
    mixed = plain.rewind(6).resume(interventions=steering)
    assert mixed.tokens[:6] == plain.tokens[:6] and mixed.request.interventions


def test_scores_are_those_of_the_steered_model(lm: Any, steering: list[Intervention]):
    text = lm.generate(PROMPT, interventions=steering, **OPTIONS)
    for step, explained in zip(text.steps, text.explained(top=3).steps, strict=True):
        assert explained.logprob == pytest.approx(step.logprob, abs=1e-6)
        assert explained.candidates
    chosen = text.rewind(4).choose(text.tokens[4:7])
    expected = [step.logprob for step in text.steps[4:7]]
    assert [step.logprob for step in chosen.steps[4:]] == pytest.approx(expected, abs=1e-6)
    best = {candidate.token: candidate.logprob for candidate in text.alternatives(4, 300)}
    assert best[text.tokens[4]] == pytest.approx(text.steps[4].logprob, abs=1e-6)
    look = lm.look(text, position=len(text.prompt) + 3)
    plain = lm.look([*text.prompt, *text.tokens], position=len(text.prompt) + 3)
    logprobs = look.logits - np.log(np.exp(look.logits.astype(np.float64)).sum())
    assert logprobs[text.tokens[4]] == pytest.approx(text.steps[4].logprob, abs=1e-4)
    assert np.abs(look.residuals - plain.residuals).max() > 0.1


def test_saved_and_replayed(lm: Any, steering: list[Intervention], tmp_path: Path):
    text = lm.generate(PROMPT, interventions=steering, **OPTIONS)
    text.save(tmp_path / "steered.json")
    replayed = lm.replay(tmp_path / "steered.json")
    assert replayed.exact and replayed.generation.request.interventions == tuple(steering)
    opened = lm.open(tmp_path / "steered.json")
    assert opened.rewind(3).resume().tokens == text.tokens
    copied = lm.attach(pickle.loads(pickle.dumps(text)))
    assert copied.rewind(3).resume().tokens == text.tokens
    data = json.loads((tmp_path / "steered.json").read_text())
    for change in ({"site": "resid"}, {"layers": [9]}, {"op": {"kind": "add", "vector": [1, 2]}}):
        broken = copy.deepcopy(data)
        broken["interventions"][0] |= change
        (tmp_path / "broken.json").write_text(json.dumps(broken))
        with pytest.raises(SettingsError if "site" not in change else ValueError):
            lm.replay(tmp_path / "broken.json")


@given(
    kind=st.sampled_from(OPS),
    layers=st.sampled_from([None, 0, (1, 0), range(2)]),
    positions=st.sampled_from(["all", "generated", "last", 3, range(2, 5), slice(4, None)]),
    heads=st.sampled_from([None, 1, (0, 2)]),
)
def test_json_keeps_everything(kind: str, layers: Any, positions: Any, heads: Any):
    op = random_op(kind, 6, np.random.default_rng(0))
    before = Intervention("head_out", op, layers, positions, heads, model="0f")
    after = Intervention.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after == before and after.digest == before.digest and after.model == "0f"
    assert json.loads(json.dumps(after.summary()))["digest"] == before.digest
    for other in (
        Intervention("head_out", op, (2,), positions, heads),
        Intervention("head_out", op, layers, 17, heads),
        Intervention("attn_out", op, layers, positions),
        Intervention("head_out", random_op(kind, 6, np.random.default_rng(9)), layers, 90, heads),
    ):
        assert other != before and other.digest != before.digest


def test_hook_names():
    assert parse_hook_name("blocks.5.hook_resid_post") == ("resid_post", 5)
    assert parse_hook_name("blocks.0.attn.hook_z") == ("head_out", 0)
    assert parse_hook_name("hook_embed") == ("embedding", None)
    assert parse_hook_name("ln_final.hook_normalized") == ("final_norm", None)
    assert parse_hook_name("mlp_out.12") == ("mlp_out", 12)
    for name in (
        "blocks.5.hook_embed",
        "hook_resid_post",
        "blocks.x.hook_z",
        "resid_post",
        "logits.3",
    ):
        with pytest.raises(SettingsError, match="no hook is called"):
            parse_hook_name(name)


WRONG = [
    ({"site": "resid", "op": Scale(0)}, "site must be one of embedding, resid_pre, .* got 'resid'"),
    ({"site": "mlp_out", "op": "zero"}, "op must be one of Add, "),
    ({"site": "mlp_out", "op": Scale(0), "layers": 7}, r"layer must be from 0 to 3 .*, got 7"),
    ({"site": "mlp_out", "op": Scale(0), "layers": (0, -4)}, "names a layer twice"),
    ({"site": "logits", "op": Scale(2), "layers": 0}, "logits has no layers"),
    ({"site": "mlp_out", "op": Add([1.0] * 5)}, "has width 5, and mlp_out in layer 0 has 64"),
    ({"site": "head_out", "op": Add([1.0] * 64), "heads": 0}, "a head of head_out .* has 16"),
    ({"site": "head_out", "op": Scale(0), "heads": 4}, "from 0 to 3, got 4"),
    ({"site": "mlp_out", "op": Scale(0), "heads": 0}, "mlp_out has no heads"),
    ({"site": "mlp_out", "op": Add(np.ones((3, 64)))}, "vectors for 3 layers, .* has 4"),
    ({"site": "q", "op": Scale(0)}, "q needs the torch backend"),
    ({"site": "recurrent_out", "op": Scale(0)}, "no layer of this model has recurrent_out"),
    ({"site": "mlp_out", "op": Function(abs)}, "Function needs the torch backend"),
    ({"site": "mlp_out", "op": Scale(0), "positions": range(5, 5)}, "positions must be 'all', "),
    ({"site": "mlp_out", "op": Scale(0), "positions": -1}, "positions must be 'all', "),
    ({"site": "mlp_out", "op": Replace(np.ones((1, 3, 64))), "layers": 0}, "vectors for 3 tokens"),
    ({"site": "mlp_out", "op": Scale(0), "model": "abc"}, "model with fingerprint abc"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "problem"), WRONG)
def test_mistakes_are_explained(lm: Any, values: dict[str, Any], problem: str):
    with pytest.raises(SettingsError, match=problem):
        lm.generate(PROMPT, interventions=Intervention(**values))


def test_mistakes_in_values():
    for make, problem in (
        (lambda: Add([1.0, np.nan]), "vector of add has a value that is NaN"),
        (lambda: Add("x"), "must be an array of numbers"),
        (lambda: Add(np.ones((2, 2, 2))), r"shape \[width\] or \[layers, width\]"),
        (lambda: Add([1.0], scale=float("inf")), "must be finite"),
        (lambda: ProjectOut([0.0, 0.0]), "must not be zero"),
        (lambda: as_interventions("happy"), "must be a list of Intervention"),
        (lambda: as_interventions([{"site": "logits"}]), "needs site"),
        (lambda: as_interventions([{"site": "logits", "op": {"kind": "zero"}}]), "kind among add"),
        (lambda: as_interventions([{"site": "logits", "op": {"kind": "add"}}]), "add needs vector"),
        (
            lambda: as_interventions(
                [
                    {
                        "hook": "hook_logits",
                        "op": {"kind": "add", "vector": {"shape": [3], "data": "AAAA"}},
                    }
                ]
            ),
            "an array must be a list",
        ),
    ):
        with pytest.raises(SettingsError, match=problem):
            make()
