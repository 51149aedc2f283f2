"""Canvases as they are used: beside ordinary texts, in little memory, with a twin, and wrongly."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers import canvas_support as support
from helpers import null_model, tiny_masked
from helpers.canvas_support import MASK
from helpers.deep_null import MASK as NULL_MASK
from helpers.deep_null import VOCAB, engine_with, expected_logits, fresh, mixed
from helpers.engine_support import nothing_leaks, pause_thread, request
from unspool import native
from unspool.engine.canvas import CanvasKind, PassRequest, open_canvas, run_passes
from unspool.errors import ContextError, SettingsError, UnspoolError
from unspool.model.adapters import Adapter, LowRank

TEXT = [7, 41, 99, 3, 150, 12, 200, 64, 31, 5, 18, 77, 240, 9, 11, 120, 33, 8, 54]
WHOLE = CanvasKind(mask_id=NULL_MASK, sight="whole")
CAUSAL = CanvasKind(mask_id=NULL_MASK, sight="causal")


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(
    ("sight", "block", "shifted"),
    [("whole", 0, True), ("block", 8, False), ("block", 24, True), ("causal", 0, False)],
)  # fmt: skip
def test_logits_are_those_of_transformers(
    tmp_path: Path, backend: str, sight: str, block: int, shifted: bool
):
    if backend == "native" and native.missing_reason() is not None:
        pytest.skip("no native library")
    lm = support.seeing(tmp_path, backend=backend, sight=sight, block=block, shifted=shifted)
    places = [MASK] * 13
    with lm.canvas(TEXT, 13) as canvas:
        for number, token in ((2, 17), (12, 90), (0, 33), (2, MASK)):
            canvas.set(number, token)
            places[number] = token
            tokens = [*TEXT, *places]
            sees = support.ends(len(tokens), sight, block, len(TEXT))
            expected = support.all_logits(tokens, sees).numpy()
            expected = expected[len(TEXT) - shifted : len(tokens) - shifted]
            results = np.array(canvas.logits())
            results[:, MASK] = -np.inf
            # The native backend keeps keys and values in 16 bits.
            np.testing.assert_allclose(results, expected, atol=2e-4 if backend == "torch" else 3e-2)


@pytest.mark.parametrize("name", [n for n, f in tiny_masked.FAMILIES.items() if not f.is_bert])
def test_a_canvas_is_computed_as_its_family_does(tmp_path: Path, name: str):
    oracle = tiny_masked.save(name, tmp_path)
    lm = unspool.load(tmp_path, backend="torch", memory=8 << 20)
    with lm.canvas(TEXT, 14) as canvas:
        canvas.set(2, 17)
        tokens = [*TEXT, *canvas.tokens]
        logits = np.array(canvas.logits())
    expected = oracle(torch.tensor([tokens]))[0].detach().numpy()
    first = len(TEXT) - lm.config.shifted
    np.testing.assert_allclose(logits, expected[first : first + 14], atol=2e-4)
    assert len(lm.diffuse(TEXT, max_tokens=8, threshold=0.1, end=False).tokens) == 8


def test_a_twin_fills_the_canvas_behind_the_text_of_the_model_itself(tmp_path: Path):
    """The text is the base's, in every number; the canvas is computed by base plus adapter, reading
    the base's keys and values."""
    lm = support.seeing(tmp_path, sight="causal")
    chance = np.random.default_rng(5)
    name, shape = "layers.{}.attention.q.weight", (48, 48)
    parts = {
        name.format(layer): LowRank(
            chance.standard_normal((4, shape[1])).astype(np.float32),
            chance.standard_normal((shape[0], 4)).astype(np.float32) * np.float32(0.3),
            0.5,
        )
        for layer in range(4)
    }
    lm.engine.adapters.load("twin", Adapter(parts))
    before = np.array(lm.engine.extend(branch := lm.engine.open(TEXT)))
    branch.release()
    kind = CanvasKind(mask_id=MASK, sight="causal", canvas_adapter="twin")
    places = [MASK, 17, MASK, MASK, 9]
    with open_canvas(lm.engine, TEXT, 5, kind) as canvas:
        canvas.set(1, 17)
        canvas.set(4, 9)
        results = np.array(canvas.logits())
        expected = by_two_models(parts, TEXT, places)
        np.testing.assert_allclose(results, expected, atol=2e-4)
        for number, token in enumerate((5, 6, 7, 8, 9)):
            canvas.set(number, token)
        canvas.commit(5)
        canvas.append(2)
        expected = by_two_models(parts, [*TEXT, 5, 6, 7, 8, 9], [MASK, MASK])
        np.testing.assert_allclose(np.array(canvas.logits()), expected, atol=2e-4)
    after = np.array(lm.engine.extend(branch := lm.engine.open(TEXT)))
    branch.release()
    np.testing.assert_allclose(after, before, atol=1e-4)


@torch.inference_mode()
def by_two_models(parts: Any, text: list[int], places: list[int]) -> Any:
    base = support.oracle()
    past = base(torch.tensor([text]), use_cache=True).past_key_values
    added = {}
    for number, layer in enumerate(base.model.layers):
        part = parts[f"layers.{number}.attention.q.weight"]
        added[layer.self_attn.q_proj] = torch.from_numpy(part.delta())
    try:
        for module, delta in added.items():
            module.weight += delta
        mask = torch.zeros(1, 1, len(places), len(text) + len(places))
        positions = torch.arange(len(text), len(text) + len(places))[None]
        results = base(
            torch.tensor([places]),
            past_key_values=past,
            attention_mask=mask,
            position_ids=positions,
        )
    finally:
        for module, delta in added.items():
            module.weight -= delta
    return results.logits[0].numpy()


def test_canvases_and_texts_run_in_the_same_steps():
    engine = engine_with()
    # The text is still being written when the canvases end.
    stream = engine.submit(request([1, 2, 0], 200, settings={"temperature": 0}))
    canvases = [open_canvas(engine, [1, 2, n], 4 + n, WHOLE) for n in range(3)]
    for token in range(4):
        results = run_passes([PassRequest(canvas) for canvas in canvases])
        for number, (canvas, logits) in enumerate(zip(canvases, results, strict=True)):
            assert np.array_equal(logits, expected_logits([1, 2, number], canvas.tokens, WHOLE))
            canvas.set(token, token)
    assert any(len(rows) > 1 and 1 in rows and max(rows) > 6 for rows in engine.backend.runs)
    tokens = [1, 2, 0]
    for step in islice(stream, 12):
        sees = np.arange(len(tokens)) + 1
        assert step.token == int(fresh(tokens, sees, sees * 0, len(tokens) - 1).argmax())
        tokens.append(step.token)
    stream.close()
    engine.close()


def test_a_long_canvas_is_never_cut():
    """Its tokens see each other, so they are computed in one step, however many a step may have."""
    engine = engine_with()
    with open_canvas(engine, list(range(30)), 40, WHOLE) as canvas:
        assert np.array_equal(
            canvas.logits(), expected_logits(list(range(30)), [NULL_MASK] * 40, WHOLE)
        )
    assert [70] in engine.backend.runs
    engine.close()


@pytest.mark.parametrize("lost", [False, True])
def test_passes_over_some_places_are_the_same_when_their_pages_were_lost(lost: bool):
    """Approximate, but a function of what was seen: memory and forks change nothing."""
    engine = engine_with()
    canvas = open_canvas(engine, [1, 2, 0, 1, 1], 8, WHOLE)
    tokens, results = [1, 2, 0, 1, 1, *[NULL_MASK] * 8], []
    canvas.logits()
    visible_ends, adapters = np.full(13, 13), np.zeros(13, int)
    for place in (2, 3):
        canvas.set(place, place)
        if lost and place == 2:
            canvas = canvas.fork()
        elif lost:
            engine.call(partial(engine.tree.preempt, canvas.branch))
        results.append(canvas.logits(2, 5))
    assert [len(part) for part in results] == [3, 3]
    now = tokens.copy()
    for number, place in enumerate((2, 3)):
        now[5 + place] = place
        expected = approximate(tokens, now, range(7, 10))
        assert np.array_equal(results[number], expected)
    full_pass = canvas.logits()
    expected = [fresh(now, visible_ends, adapters, position) for position in range(5, 13)]
    assert np.array_equal(full_pass, expected), "a whole pass is exact again"
    engine.close()


def test_what_was_committed_since_the_last_whole_pass_stays():
    engine = engine_with()
    canvas = open_canvas(engine, [1, 2], 6, WHOLE)
    canvas.logits()
    canvas.set(0, 5)
    canvas.commit(1)
    other = canvas.fork()  # it has to see the last whole pass again
    assert np.array_equal(other.logits(1, 3), canvas.logits(1, 3))
    assert engine.call(lambda: other.branch.tokens)[:3] == [1, 2, 5]
    expected = expected_logits([1, 2, 5], [NULL_MASK] * 5, WHOLE)
    assert np.array_equal(other.logits(), expected)
    other.set(2, 7)
    engine.backend.fail_next = True
    with pytest.raises(RuntimeError, match="gone"):
        other.logits(1, 3)
    places = [NULL_MASK, NULL_MASK, 7, NULL_MASK, NULL_MASK]
    assert np.array_equal(other.logits(), expected_logits([1, 2, 5], places, WHOLE))
    engine.close()


def approximate(old: list[int], new: list[int], window: range) -> Any:
    """The places of the window are computed anew, all others as they were."""
    old_states = [mixed(old, 0)] * len(old)
    for position in window:
        old_states[position] = mixed(new, 0)
    row = null_model.logits_after([mixed(old_states, 0)], VOCAB)
    return np.array([row] * len(window))


def test_what_is_dropped_from_a_canvas_is_found_by_nobody_as_text():
    engine = engine_with()
    canvas = open_canvas(engine, [1, 2, 1], 3, CAUSAL)
    for place in range(3):
        canvas.set(place, place)
    canvas.logits()
    canvas.commit(2)  # what the pass computed of them is not what a text would have
    reader = engine.open([1, 2, 1, 0, 1, 2, 0])
    sees = np.arange(7) + 1
    expected = fresh([1, 2, 1, 0, 1, 2, 0], sees, sees * 0, 6)
    assert np.array_equal(engine.extend(reader)[0], expected)
    engine.close()


@pytest.mark.parametrize("sight", ["whole", "causal", "block"])
def test_pages_come_back_however_a_canvas_ends(sight: str):
    engine = engine_with()
    kind = CanvasKind(mask_id=NULL_MASK, sight=sight, block=4)
    canvas = open_canvas(engine, [1, 2, 0, 1, 1], 8, kind)
    canvas.logits()
    other = canvas.fork()
    other.logits()
    canvas.close()
    canvas.close()
    del other
    gc.collect()
    nothing_leaks(engine)
    with pytest.raises(UnspoolError, match="released"):
        canvas.logits()
    engine.close()


def test_a_failed_step_costs_only_that_pass():
    engine = engine_with()
    canvas = open_canvas(engine, [1, 2, 0], 4, WHOLE)
    engine.backend.fail_next = True
    with pytest.raises(RuntimeError, match="gone"):
        canvas.logits()
    assert np.array_equal(canvas.logits(), expected_logits([1, 2, 0], [NULL_MASK] * 4, WHOLE))
    canvas.close()
    nothing_leaks(engine)
    engine.close()


def test_a_canvas_is_computed_for_one_caller_at_a_time():
    engine = engine_with()
    canvas = open_canvas(engine, [1, 2, 0], 4, WHOLE)
    gate = pause_thread(engine)
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(canvas.logits) for _ in range(2)]
        while len(engine.loop._commands) < 2:
            time.sleep(0.001)
        gate.set()
        refused, computed = sorted(jobs, key=lambda job: job.exception(30) is None)
    assert "another caller" in str(refused.exception())
    expected = expected_logits([1, 2, 0], [NULL_MASK] * 4, WHOLE)
    assert np.array_equal(computed.result(), expected)
    engine.close()


@pytest.mark.parametrize(
    ("work", "error", "words"),
    [
        (lambda c: c.set(9, 1), SettingsError, "place must be from 0 to 3, got 9"),
        (lambda c: c.set(0, 999), SettingsError, "not in the vocabulary"),
        (lambda c: c.commit(2), SettingsError, "place 0 is still masked"),
        (lambda c: c.commit(9), SettingsError, "cannot commit"),
        (lambda c: c.append(600), ContextError, "context"),
        (lambda c: c.logits(3, 2), SettingsError, "places must satisfy"),
        (lambda c: open_canvas(c.engine, [], 0, WHOLE), SettingsError, "empty"),
        (lambda c: open_canvas(c.engine, [1], 600, WHOLE), ContextError, "holds 512"),
        (lambda c: open_canvas(c.engine, [1], 4, CanvasKind(mask_id=1, sight="block")),
         SettingsError, "block must be >= 1"),
        (lambda c: open_canvas(c.engine, [1], 4, CanvasKind(mask_id=1, canvas_adapter="x")),
         SettingsError, "no adapter 'x'"),
        (lambda c: open_canvas(c.engine, [1], 4, CAUSAL).logits(0, 2), SettingsError, "the whole"),
    ],
)  # fmt: skip
def test_mistakes_are_told(work: Any, error: type[Exception], words: str):
    engine = engine_with()
    canvas = open_canvas(engine, [1, 2, 0], 4, WHOLE)
    with pytest.raises(error, match=words):
        work(canvas)
    assert np.array_equal(canvas.logits(), expected_logits([1, 2, 0], [NULL_MASK] * 4, WHOLE))
    engine.close()
