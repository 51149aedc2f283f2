"""What results are besides their data: they pickle, print in one line, and show in a notebook."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest

import unspool
from unspool import SettingsError, UnspoolError

PROMPT = [5, 6, 7, 8]
WRITE: dict[str, Any] = {"max_tokens": 6, "seed": 3, "end": False}


@pytest.fixture(scope="module")
def lm(small_lm: Any) -> Any:
    return small_lm


@pytest.fixture(scope="module")
def results(tiny_lm: Any) -> dict[str, Any]:
    """One of everything that the model's methods give."""
    text = tiny_lm.generate(PROMPT, **WRITE, top=3, explain=True, guard="loop")
    look = tiny_lm.look(PROMPT)
    results = {
        "generation": text,
        "batch": tiny_lm.generate([PROMPT, PROMPT[:2]], **WRITE),
        "step": text.steps[1],
        "candidate": text.steps[1].candidates[0],
        "stage": text.steps[1].stages[0],
        "draw": text.steps[1].draw,
        "usage": text.usage,
        "request": text.request,
        "settings": text.settings,
        "score": tiny_lm.score(PROMPT, top=2),
        "token score": tiny_lm.score(PROMPT, top=2).positions[1],
        "samples": tiny_lm.samples(PROMPT, 3, **WRITE),
        "ranking": tiny_lm.beam(PROMPT, beams=3, results=2, max_tokens=4),
        "vote": tiny_lm.vote(PROMPT, 3, extract=lambda g: g.tokens[0], **WRITE),
        "tree": tiny_lm.search(PROMPT, width=2, tokens=2, keep=1, depth=2, seed=1),
        "node": tiny_lm.search(PROMPT, width=2, tokens=2, keep=1, depth=2, seed=1).leaf,
        "look": look,
        "lens": tiny_lm.logit_lens(look, full_vocabulary=True),
        "layer": tiny_lm.logit_lens(look).layers[1],
        "attribution": tiny_lm.attribution(look),
        "part": tiny_lm.attribution(look).parts[0],
        "neighbours": tiny_lm.neighbours(7, 3),
        "trace": tiny_lm.trace(text),
        "fingerprint": tiny_lm.trace(text).model,
        "replay": tiny_lm.replay(tiny_lm.trace(text)),
    }
    return results


def plain(value: Any) -> Any:
    """A result as numbers and texts, to be compared."""
    if isinstance(value, unspool.Generation):
        return [plain(getattr(value, f.name)) for f in dataclasses.fields(value)
                if f.name not in ("source", "request")] + [plain(value.request)]  # fmt: skip
    if type(value).__name__ == "SearchNode":  # they point at each other
        return [
            plain(value.generation),
            value.score,
            value.pruned,
            list(map(plain, value.children)),
        ]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        return [plain(getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def test_every_result_comes_back_from_a_pickle_and_a_copy(results: dict[str, Any]):
    for name, result in results.items():
        for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result), copy.copy(result)):
            assert type(again) is type(result), name
            assert plain(again) == plain(result), name


def test_a_copy_goes_on_and_what_was_pickled_is_attached(tiny_lm: Any):
    text = tiny_lm.generate(PROMPT, **WRITE, speculate="lookup")
    longer = text.resume(max_tokens=3).tokens
    for again in (copy.deepcopy(text), copy.copy(text)):
        again.steps.pop()
        assert len(text.steps) == 6
        assert again.resume(max_tokens=4).tokens == longer
    loaded = pickle.loads(pickle.dumps(text))
    assert loaded.text == text.text and loaded.tokens == text.tokens
    assert loaded.rewind(2).tokens == text.tokens[:2]
    for use in (loaded.resume, loaded.explained, lambda: loaded.alternatives(0)):
        with pytest.raises(UnspoolError, match=r"lm\.attach\(generation\)"):
            use()
    assert tiny_lm.attach(loaded).resume(max_tokens=3).tokens == longer


def test_a_stage_of_ones_own_is_named_but_not_pickled(tiny_lm: Any):
    secret = object()  # what a closure holds need not be picklable

    def mine(tokens: Any, logits: Any) -> Any:
        assert secret is not None
        return logits

    text = tiny_lm.generate(PROMPT, **WRITE, stages=[mine, ...])
    loaded = tiny_lm.attach(pickle.loads(pickle.dumps(text)))
    assert loaded.settings.stages[0].name == "mine"
    with pytest.raises(SettingsError, match="'mine' was a function, which is not pickled"):
        loaded.resume(max_tokens=8)
    assert loaded.resume(max_tokens=8, stages=[mine, ...]).tokens[:6] == text.tokens


def test_a_grammar_is_compiled_again(lm: Any):
    text = lm.generate("Numbers:", regex=r" [0-9]{12}", max_tokens=4, seed=1)
    again = lm.attach(pickle.loads(pickle.dumps(text)))
    done = again.resume(max_tokens=40)
    assert re.fullmatch(r" [0-9]{12}", done.text)
    assert done.tokens == text.resume(max_tokens=40).tokens


def test_every_result_is_one_short_line(results: dict[str, Any], tiny_lm: Any):
    for name, result in {**results, "model": tiny_lm}.items():
        for item in result if isinstance(result, tuple) else [result]:
            line = repr(item)
            assert "\n" not in line and len(line) < 200, (name, line)
    assert repr(results["settings"]) == "SamplingSettings(seed=3)"


def public_classes(results: dict[str, Any]) -> list[type]:
    named = [getattr(unspool, name) for name in unspool.__all__]
    public = {item for item in named if inspect.isclass(item)}
    for result in results.values():
        for item in result if isinstance(result, list | tuple) else [result]:
            public.add(type(item))
    classes = {
        base for item in public for base in item.__mro__ if base.__module__.startswith("unspool")
    }
    return sorted(classes, key=lambda item: item.__name__)


def test_the_steps_of_a_text_cost_the_garbage_collector_nothing(tiny_lm: Any):
    """It would visit each of them in every full collection; they cannot be part of a cycle."""
    text = tiny_lm.generate([1, 2, 3], max_tokens=20, end=False)
    assert len(text.steps) == 20
    assert not any(gc.is_tracked(step) for step in text.steps)
    for step in text.steps:
        references = gc.get_referents(step)
        assert all(type(value) in (int, float, str, bytes, bool, type(None), tuple, type)
                   for value in references), references  # fmt: skip
    copied = pickle.loads(pickle.dumps(text.steps))
    assert copied == text.steps == copy.deepcopy(text.steps)


def test_everything_public_has_a_docstring(results: dict[str, Any]):
    classes = public_classes(results)
    assert len(classes) > 30
    assert inspect.getdoc(unspool.load)
    missing = []
    for kind in classes:
        if not (kind.__doc__ or "").strip() or kind.__doc__.startswith(f"{kind.__name__}("):
            missing.append(kind.__name__)
        for name, member in vars(kind).items():
            is_documented = isinstance(
                member, property | classmethod | staticmethod
            ) or inspect.isfunction(member)
            if is_documented and not name.startswith("_") and not inspect.getdoc(member):
                missing.append(f"{kind.__name__}.{name}")
    assert not missing
