"""Writing a saved generation again: the same, or where it first differs."""

from __future__ import annotations

import dataclasses
import json

import pytest
import typer

import unspool
from helpers import tiny
from unspool.cli.inspection import replay as command
from unspool.errors import ContextError, ModelFileError, UnspoolError
from unspool.lens.activations import get_activations
from unspool.lens.attribution import attribution
from unspool.lens.replay import replay
from unspool.lens.trace import load_trace, save_trace, trace_of
from unspool.sampling import GrammarSpec
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.monitors import LoopGuard, PredicateGuard, SurpriseGuard

PROMPT = [1, 40, 77]


def saved_and_loaded(lm, generation, tmp_path):
    """Through a file, as it would be."""
    save_trace(trace_of(lm, generation), tmp_path / "t.json")
    return load_trace(tmp_path / "t.json")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0},
        {"mirostat_tau": 4.0},
        {"repetition_penalty": 1.3, "dry_multiplier": 0.8, "sample": 3},
        {"explain": False, "top": 0, "end": False},
    ],
)
def test_reproduced(options, tiny_lm, tmp_path):
    generation = tiny_lm.generate(PROMPT, max_tokens=40, seed=9, **options)
    result = replay(tiny_lm, saved_and_loaded(tiny_lm, generation, tmp_path))
    assert result.exact and result.model_difference is None and result.num_scored == 0
    assert result.max_logprob_difference < 1e-4
    assert result.generation.tokens == generation.tokens
    now, then = result.generation.steps[-1], generation.steps[-1]
    assert now.draw == then.draw or now.draw.u == then.draw.u
    assert now.finish_reason == then.finish_reason
    assert "exactly" in result.describe()
    assert json.loads(json.dumps(result.to_dict()))["exact"] is True


def test_by_another_model_it_differs_and_says_where(family_lm, tiny_lm, tmp_path):
    generation = tiny_lm.generate(PROMPT, max_tokens=12, seed=9, temperature=1.0, end=False)
    trace = saved_and_loaded(tiny_lm, generation, tmp_path)
    result = replay(family_lm("mistral"), trace)
    assert not result.exact
    assert result.model_difference is not None
    difference = result.difference
    assert difference.kind in ("token", "logprob") and difference.position == 3 + difference.index
    assert difference.then == generation.steps[difference.index]
    assert difference.now == result.generation.steps[difference.index]
    assert generation.tokens[: difference.index] == result.generation.tokens[: difference.index]
    assert f"position {difference.position}" in result.describe()
    json.dumps(result.to_dict())


def test_other_weights_and_other_settings_are_told(tiny_lm, family_lm, tmp_path):
    trace = saved_and_loaded(tiny_lm, tiny_lm.generate(PROMPT, max_tokens=3, seed=1), tmp_path)
    lm = family_lm("llama")  # the same as tiny_lm, loaded once more
    assert replay(lm, trace).exact and replay(lm, trace).model_difference is None
    weight = lm.transformer.layers[3].feed.down.weight.data
    kept_weight = weight.clone()
    weight.mul_(1.001)
    try:
        assert replay(lm, trace, tolerance=10).model_difference == "its weights are different"
    finally:
        weight.copy_(kept_weight)
    model = dataclasses.replace(trace.model, config={**trace.model.config, "norm_eps": 0.5})
    assert "norm_eps" in replay(lm, dataclasses.replace(trace, model=model)).model_difference
    model = dataclasses.replace(trace.model, precision="bfloat16")
    assert "bfloat16" in replay(lm, dataclasses.replace(trace, model=model)).model_difference


def test_each_kind_of_difference(tiny_lm, tmp_path):
    trace = saved_and_loaded(
        tiny_lm, tiny_lm.generate(PROMPT, max_tokens=10, seed=4, end=False), tmp_path
    )

    def after(index, **changes):
        steps = list(trace.steps)
        steps[index] = dataclasses.replace(steps[index], **changes)
        return replay(tiny_lm, dataclasses.replace(trace, steps=tuple(steps))).difference

    other = after(4, token=(trace.tokens[4] + 1) % 259)
    assert (other.kind, other.index, other.now.token) == ("token", 4, trace.tokens[4])
    assert after(5, logprob=trace.steps[5].logprob - 0.01).kind == "logprob"
    assert after(5, logprob=float("nan")).kind == "logprob"
    assert after(6, bytes=b"\x1b[2J").kind == "bytes"
    assert "\x1b" not in after(6, bytes=b"\x1b[2J").describe()
    assert after(9, finish_reason="stop").kind == "end"
    assert after(9, finish_reason=None) is None  # it was interrupted: no end to compare
    cut_short = replay(
        tiny_lm, dataclasses.replace(trace, limits=dataclasses.replace(trace.limits, max_tokens=7))
    )
    assert (cut_short.difference.kind, cut_short.difference.index) == ("end", 7)
    assert cut_short.difference.now is None and "end of text" in cut_short.describe()
    went_on = replay(
        tiny_lm, dataclasses.replace(trace, limits=dataclasses.replace(trace.limits, max_tokens=12))
    )
    assert (went_on.difference.kind, went_on.difference.index) == ("end", 9)


def test_words_that_a_person_chose_are_scored(tiny_lm, tmp_path):
    draft = tiny_lm.generate(PROMPT, max_tokens=80, seed=5, end=False)
    fixed = draft.rewind(70).choose(7).choose(8).resume(max_tokens=18, temperature=1.2)
    trace = saved_and_loaded(tiny_lm, fixed, tmp_path)
    assert len(fixed.steps) == 90
    result = replay(tiny_lm, trace)
    assert result.exact and result.num_scored == 72 and result.max_logprob_difference < 1e-4
    assert result.generation.tokens == fixed.tokens
    assert "72 tokens scored" in result.describe()
    # a scored token is compared too
    steps = list(trace.steps)
    steps[30] = dataclasses.replace(steps[30], logprob=steps[30].logprob - 0.5)
    difference = replay(tiny_lm, dataclasses.replace(trace, steps=tuple(steps))).difference
    assert (difference.kind, difference.index) == ("logprob", 30)


def test_interrupted_and_empty(tiny_lm, tmp_path):
    draft = tiny_lm.generate(PROMPT, max_tokens=20, seed=5, end=False)
    result = replay(tiny_lm, saved_and_loaded(tiny_lm, draft.rewind(4), tmp_path))
    assert result.exact and result.generation.tokens == draft.tokens[:4]
    nothing = tiny_lm.generate(PROMPT, max_tokens=0)
    assert replay(tiny_lm, saved_and_loaded(tiny_lm, nothing, tmp_path)).exact


def test_what_cannot_be_asked_for_again_is_judged(tiny_lm, tmp_path):
    trace = saved_and_loaded(
        tiny_lm, tiny_lm.generate(PROMPT, max_tokens=5, seed=5, end=False), tmp_path
    )
    cut_off = (*trace.steps[:4], dataclasses.replace(trace.steps[4], finish_reason=None))
    for changes in (
        {"limits": None},
        {"guarded": True},
        {"guarded": True, "guards": GuardPolicy.parse(["loop"]), "steps": cut_off},
    ):
        result = replay(tiny_lm, dataclasses.replace(trace, **changes))
        assert result.exact and result.num_scored == 5
    with pytest.raises(ModelFileError, match="no tokenizer"):  # a grammar needs to know the words
        replay(tiny_lm, dataclasses.replace(trace, grammar=GrammarSpec.regex("a+")))


def test_guards_are_written_under_again(tiny_lm, tmp_path):
    options = {"max_tokens": 60, "temperature": 0, "end": False}
    free = tiny_lm.generate(PROMPT, **options)
    guard = GuardPolicy((SurpriseGuard(spike=1.5), LoopGuard(repeats=2, min_tokens=2)), retries=9)
    generation = tiny_lm.generate(PROMPT, guard=guard, **options)
    assert generation.tokens != free.tokens
    trace = saved_and_loaded(tiny_lm, generation, tmp_path)
    assert trace.guards == guard
    result = replay(tiny_lm, trace)
    assert result.exact and result.num_scored == 0
    own_guard = dataclasses.replace(
        guard, guards=(*guard.guards, PredicateGuard(lambda text, ids: None))
    )
    generation = tiny_lm.generate(PROMPT, guard=own_guard, **options)
    trace = saved_and_loaded(tiny_lm, generation, tmp_path)
    assert trace.guards is None and trace.guarded
    assert replay(tiny_lm, trace).num_scored == len(generation.steps)
    assert replay(tiny_lm, trace, guards=own_guard).num_scored == 0


def test_nothing_stays_open(tiny_lm, tmp_path):
    draft = tiny_lm.generate(PROMPT, max_tokens=20, seed=5, end=False)
    trace = saved_and_loaded(tiny_lm, draft.rewind(9).choose(3), tmp_path)
    replay(tiny_lm, trace)
    used = tiny_lm.engine.tree.pool.used
    for _ in range(3):
        replay(tiny_lm, trace)
    assert tiny_lm.engine.tree.pool.used <= used


def test_hostile_traces_are_refused_before_they_run(tiny_lm, tmp_path):
    trace = saved_and_loaded(tiny_lm, tiny_lm.generate(PROMPT, max_tokens=5, seed=5), tmp_path)

    def changed(**changes):
        return dataclasses.replace(trace, **changes)

    with pytest.raises(UnspoolError, match="vocabulary"):
        replay(tiny_lm, changed(prompt=(1, 2, 9_999_999)))
    with pytest.raises(ContextError, match="length is 128"):
        replay(tiny_lm, changed(prompt=(1,) * 500))
    bias = dataclasses.replace(trace.settings, logit_bias={9_000_000: 1.0})
    with pytest.raises(UnspoolError, match="vocabulary"):
        replay(tiny_lm, changed(settings=bias))
    limits = dataclasses.replace(
        trace.limits, max_tokens=10**9, context=10**9, top=10**9, sample=2**63 - 1
    )
    assert not replay(tiny_lm, changed(limits=limits)).exact  # another sample, another text
    assert tiny_lm.generate(PROMPT, max_tokens=2, seed=1).tokens  # the engine lives


@pytest.fixture
def unspool_replay(tiny_lm, monkeypatch, capfd):
    app = typer.Typer()
    app.command()(command)
    requests = {}

    def load(model, **options):
        requests.update(options, model=model)
        return tiny_lm

    monkeypatch.setattr("unspool.loading.load", load)

    def run(*arguments):
        code = app(args=list(map(str, arguments)), standalone_mode=False)
        out, err = capfd.readouterr()
        return code or 0, out, err, requests

    return run


def test_the_command(unspool_replay, tiny_lm, tmp_path):
    saved_and_loaded(tiny_lm, tiny_lm.generate(PROMPT, max_tokens=5, seed=5), tmp_path)
    code, _out, err, requests = unspool_replay(tmp_path / "t.json", "--offline")
    assert code == 0 and "reproduced exactly" in err
    assert (requests["model"], requests["dtype"], requests["context"]) == (None, "float32", None)
    assert requests["offline"] is True and requests["backend"] == "auto"


def test_the_command_tells_a_difference(unspool_replay, tiny_lm, tmp_path):
    trace = saved_and_loaded(tiny_lm, tiny_lm.generate(PROMPT, max_tokens=5, seed=5), tmp_path)
    hostile = dataclasses.replace(trace.steps[0], text="\x1b[2J\x07boo", logprob=3.0)
    model = dataclasses.replace(trace.model, weights="0", name="\x1b[2J")
    changed = dataclasses.replace(trace, steps=(hostile, *trace.steps[1:]), given=5, model=model)
    save_trace(changed, tmp_path / "t.json")
    code, out, err, _ = unspool_replay(tmp_path / "t.json")
    assert code == 1 and "position 3" in err and "weights are different" in err
    assert "\x1b" not in out + err and "\x07" not in out + err


def test_the_command_refuses_a_broken_file_before_loading(unspool_replay, tmp_path, monkeypatch):
    (tmp_path / "t.json").write_text("{}")
    monkeypatch.setattr("unspool.loading.load", lambda *a, **o: pytest.fail("loaded"))
    with pytest.raises(UnspoolError, match="not an Unspool trace"):
        unspool_replay(tmp_path / "t.json")


def test_a_chat_and_a_grammar(lm, tmp_path):
    generation = lm.chat("Why do leaves change color in fall?", max_tokens=6, seed=7)
    trace = saved_and_loaded(lm, generation, tmp_path)
    result = replay(lm, trace)
    assert result.exact and result.generation.text == generation.text
    fixed = generation.rewind(4).choose(" because").resume(max_tokens=1)
    assert replay(lm, saved_and_loaded(lm, fixed, tmp_path)).exact
    number = lm.generate("A number:", max_tokens=6, seed=7, regex=" [0-9]+ (apples|pears)")
    result = replay(lm, saved_and_loaded(lm, number, tmp_path))
    assert result.exact and result.num_scored == 0


def test_in_16_bits(tmp_path):
    """Rounding is coarser, and told: what is seen still holds together."""
    tiny.save("qwen3", tmp_path / "model")
    lm = unspool.load(tmp_path / "model", backend="torch", dtype="bfloat16", memory=8 << 20)
    generation = lm.generate(PROMPT, max_tokens=10, seed=3, end=False)
    trace = saved_and_loaded(lm, generation, tmp_path)
    assert trace.model.precision == "bfloat16"
    assert replay(lm, trace).model_difference is None
    activations = get_activations(lm, generation, 6)
    result = attribution(lm, activations)
    assert abs(result.rest) < 0.02 * (1 + float(abs(activations.logits).max()))
