"""A caller's own function as a stage: what it is given, what it may give, whom faults concern."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from unspool import SettingsError
from unspool.errors import UnspoolError
from unspool.sampling import DEFAULT_STAGES, Chain, RowInput, SamplingSettings
from unspool.sampling.settings import MIROSTAT_STAGES

PROMPT = [5, 6, 7, 8]


def only(*allowed: int) -> Any:
    def only_these(tokens: Any, logits: Any) -> Any:
        new_logits = np.full_like(logits, -np.inf)
        new_logits[list(allowed)] = logits[list(allowed)]
        return new_logits

    return only_these


def test_it_is_given_the_text_so_far_and_the_whole_vocabulary():
    calls: list[tuple[list[int], Any]] = []

    def stage(tokens: Any, logits: Any) -> Any:
        calls.append((tokens.tolist(), logits.copy()))
        tokens[:] = 0  # its own copies
        logits[:] = 0.0
        return logits

    logits = np.array([[0.0, 3.0, 2.0, 1.0], [3.0, 0.0, 1.0, 2.0]], np.float32)
    settings = SamplingSettings(stages=["top_k", stage], top_k=2, temperature=1)
    histories = [np.array([1, 2]), np.array([3])]
    chain = Chain([settings, settings])
    picks = chain.pick(logits, [RowInput(history) for history in histories], explain=True)
    assert [tokens for tokens, _ in calls] == [[1, 2], [3]]
    assert histories[0].tolist() == [1, 2]
    removed = -np.inf
    assert calls[0][1].tolist() == [removed, 3, 2, removed]
    assert calls[1][1].tolist() == [3, removed, removed, 2]
    for pick, two in zip(picks, ({1, 2}, {0, 3}), strict=True):
        assert [report.name for report in pick.stages] == ["top_k", "stage"]
        assert {token for token, _ in pick.stages[-1].top} == two  # what was removed stays so
        assert pick.probability == 0.5


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("place", ["first", "last"])
def test_it_decides_the_pick_wherever_it_stands(temperature: float, place: str):
    logits = np.random.default_rng(1).normal(size=(1, 500)).astype(np.float32)
    mine = only(77)
    stages = [mine, ...] if place == "first" else [*DEFAULT_STAGES[:6], "temperature", mine]
    pick = Chain(SamplingSettings(stages=stages, temperature=temperature)).pick_one(logits[0])
    assert pick.token == 77


def test_the_usual_stages_are_three_dots():
    mine = only(1)
    names = SamplingSettings(stages=[mine, ...]).stages[1:]
    assert names == DEFAULT_STAGES
    assert SamplingSettings(stages=[..., mine], mirostat_tau=5).stages[:-1] == MIROSTAT_STAGES
    with pytest.raises(SettingsError, match="twice"):
        SamplingSettings(stages=["top_k", ...])
    with pytest.raises(SettingsError, match="list of functions"):
        SamplingSettings(stages=mine)


def failing(tokens: Any, logits: Any) -> Any:
    raise RuntimeError("no idea")


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (failing, "the stage 'failing' raised RuntimeError: no idea"),
        (
            lambda tokens, logits: None,
            "returned nothing; it must return one logit for each of the 259",
        ),
        (lambda tokens, logits: logits[:3], r"returned an array of shape \(3,\)"),
        (lambda tokens, logits: logits * np.nan, "returned NaN"),
        (lambda tokens, logits: logits - np.inf, "removed the last one"),
        (lambda tokens, logits: "words", "raised ValueError"),
    ],
)
def test_what_it_does_wrong_fails_its_own_text(tiny_lm: Any, stage: Any, words: str):
    options: dict[str, Any] = {"max_tokens": 6, "seed": 3, "end": False, "explain": True}
    other, others_steps = tiny_lm.begin(PROMPT, stages=[lambda t, x: x, ...], **options)
    with pytest.raises(UnspoolError, match=words):
        tiny_lm.generate(PROMPT, stages=[stage, ...], **options)
    list(other.extend(others_steps))
    assert other.tokens == tiny_lm.generate(PROMPT, **options).tokens


def test_it_works_with_seeds_batches_going_on_and_explaining(tiny_lm: Any):
    def alternate(tokens: Any, logits: Any) -> Any:
        """An odd token behind an even one, an even one behind an odd one."""
        logits[tokens[-1] % 2 :: 2] = -np.inf
        return logits

    def alternating(tokens: list[int]) -> bool:
        return all((a + b) % 2 == 1 for a, b in itertools.pairwise([PROMPT[-1], *tokens]))

    options: dict[str, Any] = {"stages": [alternate, ...], "max_tokens": 8, "seed": 5, "end": False}
    text = tiny_lm.generate(PROMPT, **options)
    assert alternating(text.tokens)
    assert tiny_lm.generate(PROMPT, **options).tokens == text.tokens
    assert tiny_lm.samples(PROMPT, 3, **options)[0].tokens == text.tokens
    assert text.rewind(3).resume().tokens == text.tokens
    explained = text.explained()
    assert "alternate" in [stage.name for stage in explained.steps[2].stages]
    assert explained.steps[2].probability is not None
    assert alternating(tiny_lm.generate(PROMPT, **{**options, "temperature": 0}).tokens)


def test_a_text_it_picked_is_judged_when_replayed(tiny_lm: Any, tmp_path: Any):
    text = tiny_lm.generate(PROMPT, stages=[only(3, 4, 5), ...], max_tokens=4, seed=1, end=False)
    text.save(tmp_path / "own.json")
    again = tiny_lm.replay(tmp_path / "own.json")
    assert again.exact and again.num_scored == 4
