"""Diffusion: the tokens of the published decoders, the same seed the same text, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import canvas_support as support
from helpers import reference_diffusion as reference
from helpers.canvas_support import MASK
from helpers.decoding_support import PROMPT, pages_left
from unspool.errors import ContextError, SettingsError

SHORT = PROMPT[:10]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("canvas")


@pytest.fixture(scope="module")
def full_lm(folder: Path) -> Any:
    return support.seeing(folder, sight="whole")


@pytest.fixture(scope="module")
def shifted(folder: Path) -> Any:
    return support.seeing(folder, sight="whole", shifted=True)


@pytest.fixture(scope="module")
def blocks(folder: Path) -> Any:
    return support.seeing(folder, sight="block", block=4)


@pytest.fixture(scope="module")
def causal(folder: Path) -> Any:
    return support.seeing(folder, sight="causal", block=4, shifted=True)


def seen_whole(x: list[int]) -> Any:
    return support.all_logits(x, support.ends(len(x), "whole", 0))


def seen_in_blocks(block: int) -> Any:
    return lambda x: support.all_logits(x, support.ends(len(x), "block", block))


LLADA, FAST, BOUNDED = reference.llada, reference.fast_dllm, reference.entropy_bounded


@pytest.mark.parametrize(
    ("name", "decoder", "common", "reference_options", "options"),
    [
        ("full_lm", LLADA, {"block": 14, "steps": 5}, {"by": "probability"}, {"order": "fixed"}),
        ("full_lm", LLADA, {"block": 4, "steps": 2}, {"by": "probability"}, {"order": "fixed"}),
        ("full_lm", LLADA, {"block": 4, "steps": 2}, {"by": "margin"}, {"order": "margin"}),
        ("full_lm", LLADA, {"block": 14, "steps": 5}, {"by": "entropy"},
         {"order": "entropy", "entropy_bound": -0.0}),
        ("full_lm", LLADA, {"block": 14, "steps": 4, "guidance": 1.5}, {}, {"order": "fixed"}),
        ("shifted", LLADA, {"block": 14, "steps": 6}, {}, {"order": "fixed"}),  # as Dream's logits
        ("full_lm", FAST, {"block": 8, "threshold": 0.15}, {}, {}),
        ("full_lm", FAST, {"block": 8, "threshold": 0.9}, {}, {}),
        ("full_lm", FAST, {"block": 8, "factor": 2.0}, {}, {"order": "factor"}),
        ("full_lm", BOUNDED, {}, {"bound": 0.0}, {"order": "entropy", "entropy_bound": 0.0}),
        ("full_lm", BOUNDED, {}, {"bound": 3.0}, {"order": "entropy", "entropy_bound": 3.0}),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_published_decoders(
    request: pytest.FixtureRequest,
    name: str,
    decoder: Any,
    common: Any,
    reference_options: Any,
    options: Any,
):
    logits_of = reference.shifted(seen_whole) if name == "shifted" else seen_whole
    expected = decoder(logits_of, SHORT, mask=MASK, length=14, **common, **reference_options)
    lm = request.getfixturevalue(name)
    result = lm.diffuse(SHORT, max_tokens=14, end=False, **common, **options)
    assert result.tokens == expected


SEQUENTIAL = ("sequential", {"order": "left", "threshold": 1.0})
STATIC = ("low_confidence_static", {"order": "fixed"})
DYNAMIC = ("low_confidence_dynamic", {"order": "threshold", "threshold": 0.15})


@pytest.mark.parametrize(
    ("block", "strategy", "options"),
    [(4, *SEQUENTIAL), (24, *SEQUENTIAL), (8, *STATIC), (4, *DYNAMIC), (6, *DYNAMIC)],
)
def test_blocks_are_those_of_sdar(blocks: Any, block: int, strategy: str, options: dict[str, Any]):
    """Also where a block is longer than a page of the cache, or does not fit into one."""
    steps = 2 if strategy != "low_confidence_static" else block  # as SDAR writes over its prompt
    steps = block if block == 24 or len(SHORT) % block else steps
    expected = reference.sdar(
        seen_in_blocks(block), SHORT, mask=MASK, length=20, block=block, steps=steps,
        strategy=strategy, threshold=0.15,
    )  # fmt: skip
    # Our schedule is spread over what is masked, SDAR's over the block: the same one a pass.
    inputs = {"k": 1} if steps == block else {"steps": steps}
    result = blocks.diffuse(SHORT, max_tokens=20, block=block, end=False, **inputs, **options)
    assert result.tokens == expected


@pytest.mark.parametrize(("threshold", "editing"), [(0.05, 0.0), (0.1, 0.3)])
def test_edits_are_those_of_llada21(blocks: Any, threshold: float, editing: float):
    expected = reference.llada21(
        seen_in_blocks(8), SHORT, mask=MASK, length=22, block=8, threshold=threshold,
        editing=editing, post_steps=5,
    )  # fmt: skip
    result = blocks.diffuse(
        SHORT, max_tokens=22, block=8, threshold=threshold, edit=editing, edit_passes=5, end=False
    )
    assert result.tokens == expected
    if editing < 0.3:
        assert sum(item.taken_back for item in result.passes) > 0


def test_blocks_behind_causal_text(causal: Any):
    def clean(x: list[int]) -> Any:
        return support.all_logits(x, support.ends(len(x), "causal", 0))

    def noisy(x: list[int], start: int) -> Any:
        return support.all_logits(x, support.ends(len(x), "causal", 0, start))

    expected = reference.twin_blocks(
        clean, noisy, SHORT, mask=MASK, length=18, block=4, threshold=0.12
    )
    result = causal.diffuse(SHORT, max_tokens=18, threshold=0.12, end=False)
    assert result.tokens == expected
    assert [item.kind for item in result.passes].count("text") == 5, "one for each block"


@pytest.mark.parametrize(
    ("name", "order"), [("full_lm", "random"), ("blocks", "threshold"), ("causal", "random")]
)
def test_same_seed_same_text_whatever_else_runs(
    name: str, order: str, request: pytest.FixtureRequest
):
    lm = request.getfixturevalue(name)
    inputs = {"max_tokens": 12, "order": order, "k": 2, "temperature": 1.0, "threshold": 0.2}
    inputs |= {"end": False, "seed": 7}
    alone = [lm.diffuse(prompt, **inputs).tokens for prompt in (SHORT, PROMPT, SHORT[2:])]
    together = lm.diffuse([SHORT, PROMPT, SHORT[2:]], **inputs)
    assert [item.tokens for item in together] == alone
    assert lm.diffuse(SHORT, **{**inputs, "seed": 8}).tokens != alone[0]
    assert lm.diffuse(SHORT, **inputs, sample=1).tokens != alone[0]
    assert len(set(map(tuple, alone))) == 3


def test_more_texts_than_there_is_memory_for(folder: Path):
    lm = support.seeing(folder, sight="whole", memory=160 << 10)
    prompts = [[*SHORT, n] for n in range(12)]
    assert lm.engine.tree.pool.count < 12 * 3, "or all fit at once"
    inputs = {"max_tokens": 24, "threshold": 0.1, "seed": 1, "end": False}
    together = lm.diffuse(prompts, **inputs)
    assert [item.tokens for item in together[::5]] == [
        lm.diffuse(prompt, **inputs).tokens for prompt in prompts[::5]
    ]
    assert pages_left(lm) == 0


def test_each_pass_draws_anew_and_says_so(full_lm: Any):
    result = full_lm.diffuse(
        SHORT, max_tokens=8, k=1, order="left", temperature=1.0, seed=3, top=1, end=False
    )
    sampled_values = [
        step.draw.u for item in result.passes for step in item.steps if step.draw is not None
    ]
    assert len(set(sampled_values)) == len(sampled_values) == 8
    for item in result.passes:
        assert all(step.canvas_pass == item.number for step in item.steps)
    assert [step.position for step in result.steps] == list(range(10, 18))


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"threshold": 0.1},
    "sampled": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "threshold": 0.1},
    "margin": {"order": "margin", "k": 2, "temperature": 1.0},
    "entropy": {"order": "entropy", "entropy_bound": 3.0, "repetition_penalty": 1.3},
    "revised": {"threshold": 0.05, "remask": 0.3, "edit": 0.1, "edit_passes": 3, "temperature": 1},
    "at once": {"steps": 1},
}


def check_sampled_alike(lm: Any, options: dict[str, Any], prompt: list[int] = SHORT) -> None:
    """The backend's tokens are those of the host, pass by pass, and no logits are returned."""
    inputs = {"max_tokens": 11, "seed": 5, "end": False, **options}
    num_logits, launch = [], lm.engine.backend.launch

    def counted(batch: Any) -> Any:
        num_logits.append(len(batch.logits_indices))
        return launch(batch)

    lm.engine.backend.launch = counted
    try:
        on_backend = lm.diffuse(prompt, **inputs)
        assert num_logits and not any(num_logits)
        on_host = lm.diffuse(prompt, **inputs, top=1)
        assert any(num_logits)
    finally:
        lm.engine.backend.launch = launch
    assert on_backend.tokens == on_host.tokens
    assert [item.tokens for item in on_backend.passes] == [item.tokens for item in on_host.passes]
    for device_pass, host_pass in zip(on_backend.passes, on_host.passes, strict=True):
        assert [(p.number, p.text, p.change) for p in device_pass.places] == [
            (p.number, p.text, p.change) for p in host_pass.places
        ]
        assert [p.probability for p in device_pass.places] == pytest.approx(
            [p.probability for p in host_pass.places], rel=1e-4, abs=1e-7
        )
    assert [step.logprob for step in on_backend.steps] == pytest.approx(
        [step.logprob for step in on_host.steps], abs=1e-4
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("full_lm", kind) for kind in SAMPLED],
        ("shifted", "sampled"), ("blocks", "revised"), ("causal", "sampled"),
    ],
)  # fmt: skip
def test_the_backend_samples_what_the_host_samples(
    name: str, kind: str, request: pytest.FixtureRequest
):
    check_sampled_alike(request.getfixturevalue(name), SAMPLED[kind])


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_cached_passes_are_sampled_on_the_backend(full_lm: Any, cache: str):
    check_sampled_alike(full_lm, {"block": 4, "cache": cache, "k": 1, "temperature": 1.0})


@pytest.mark.parametrize("sight", [{"sight": "whole"}, {"sight": "causal", "shifted": True}])
def test_native_kernels_sample_a_canvas(folder: Path, sight: dict[str, Any]):
    with support.seeing(folder, backend="native", block=4, **sight) as lm:
        check_sampled_alike(lm, SAMPLED["sampled"])
        check_sampled_alike(lm, SAMPLED["revised"])


_PLAIN = """
import sys
import unspool
with unspool.load(sys.argv[1], backend="native", memory=8 << 20) as lm:
    for name, value in {"mask_id": 258, "sight": "whole"}.items():
        object.__setattr__(lm.config, name, value)
    options = {"temperature": 0.9, "top_k": 30, "threshold": 0.1, "seed": 5, "end": False}
    on_backend = lm.diffuse([7, 41, 99], max_tokens=11, **options)
    on_host = lm.diffuse([7, 41, 99], max_tokens=11, top=1, **options)
print(unspool.native.instruction_set(), on_backend.tokens == on_host.tokens)
"""


def test_plain_kernels_sample_a_canvas(folder: Path, full_lm: Any):
    """In a child process: the instruction set is chosen once per process."""
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN, str(folder)],
        env={**os.environ, "UNSPOOL_ISA": "plain"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["plain", "True"], done.stderr


@pytest.mark.parametrize("length", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_cuda_kernels_sample_a_canvas(length: int):
    """In Triton's interpreter: a short text in a graph, a longer one as prefill."""
    pytest.importorskip("triton")
    from helpers.cuda_support import cuda_model, language_model
    from helpers.paged_texts import RandomCheckpoint, config

    small = config(layers=1, context=64, mask_id=0, sight="whole")
    with language_model(cuda_model(RandomCheckpoint(small)), memory=1 << 20) as lm:
        options = {**SAMPLED["sampled"], "max_tokens": 3, "k": 3}
        check_sampled_alike(lm, options, list(range(1, length + 1)))


def test_a_text_ends_at_an_end_token_and_gives_its_pages_back(full_lm: Any):
    free = full_lm.diffuse(SHORT, max_tokens=16, block=4, k=1, order="left", end=False)
    third = free.tokens[2]
    short = full_lm.diffuse(
        SHORT, max_tokens=16, block=4, k=1, order="left",
        logit_bias={2: 100.0} if third == 2 else {}, end=True,
    )  # fmt: skip
    assert short.tokens == free.tokens and short.finish_reason == "length"
    full_lm.end_ids = frozenset([third])
    try:
        ended = full_lm.diffuse(SHORT, max_tokens=16, block=4, threshold=1.0, order="left")
    finally:
        full_lm.end_ids = frozenset([2])
    assert ended.tokens == free.tokens[:3] and ended.finish_reason == "stop"
    assert len(ended.passes) == 3, "nothing is filled behind it"
    assert pages_left(full_lm) == 0


@pytest.mark.parametrize("name", ["full_lm", "blocks", "causal"])
def test_leaving_a_stream_gives_the_pages_back(name: str, request: pytest.FixtureRequest):
    lm = request.getfixturevalue(name)
    stream = lm.stream_diffusion(SHORT, max_tokens=12, threshold=1.0, end=False)
    for item in stream:
        if item.number == 2:
            break
    assert pages_left(lm) == 0
    assert stream.result.finish_reason == "interrupted" and len(stream.result.passes) == 3


def test_a_canvas_given_completely_needs_no_pass(full_lm: Any):
    tokens = full_lm.diffuse(SHORT, max_tokens=6, end=False).tokens
    again = full_lm.diffuse(SHORT, given=tokens, end=False)
    assert again.tokens == tokens and not again.passes


def test_taken_back_tokens_come_to_an_end(full_lm: Any):
    result = full_lm.diffuse(SHORT, max_tokens=12, threshold=0.05, remask=0.6, end=False)
    cleared = [p.number for item in result.passes for p in item.places if p.change == "cleared"]
    assert cleared and max(cleared.count(n) for n in cleared) <= 3
    assert len(result.tokens) == 12 and MASK not in result.tokens
    bounded = full_lm.diffuse(SHORT, max_tokens=12, threshold=0.05, remask=0.6, steps=4, end=False)
    assert len(bounded.passes) <= 4 + 16 and len(bounded.tokens) == 12


def test_one_pass_shows_what_breaks(full_lm: Any):
    result = full_lm.diffuse(SHORT, max_tokens=12, steps=1, end=False)
    best, _ = reference.guesses(seen_whole([*SHORT, *[MASK] * 12]))
    assert result.tokens == best[len(SHORT) :].tolist(), "each place for itself"
    assert [item.kind for item in result.passes] == ["canvas", "look"]
    visited = seen_whole([*SHORT, *result.tokens]).softmax(-1)[len(SHORT) :]
    for place in result.passes[1].places:
        expected = float(visited[place.number, place.token])
        assert place.probability == pytest.approx(expected, rel=1e-3, abs=1e-6)
    equal = sum(a == b for a, b in zip(result.tokens, result.tokens[1:], strict=False))
    assert result.repeats == equal and f"{equal} tokens repeat" in result.notes[-1]


def test_passes_tell_every_place_of_the_block(full_lm: Any):
    result = full_lm.diffuse(SHORT, max_tokens=8, block=4, k=1, order="fixed", top=3, end=False)
    for item in result.passes:
        first = item.number // 4 * 4
        assert [place.number for place in item.places] == list(range(first, first + 4))
        assert all(len(place.candidates) == 3 for place in item.places)
        assert item.set == 1 and item.masked == 7 - item.number
    chances = seen_whole([*SHORT, *[MASK] * 8]).softmax(-1)[len(SHORT) :]
    for place in result.passes[0].places:
        assert place.probability == pytest.approx(float(chances[place.number].max()), rel=1e-3)
    assert "8 tokens in 8 passes" in repr(result)
    assert result._repr_html_().count("<tr>") > 16


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_approximate_caches_say_so_and_compute_less(full_lm: Any, cache: str):
    inputs = {"max_tokens": 16, "block": 4, "k": 1, "order": "fixed", "end": False}
    exact, quick = full_lm.diffuse(SHORT, **inputs), full_lm.diffuse(SHORT, cache=cache, **inputs)
    assert "approximate" in quick.notes[0] and not exact.notes
    assert len(quick.tokens) == 16
    first = {p.number: p.token for p in quick.passes[0].places}
    assert first == {p.number: p.token for p in exact.passes[0].places}, "the first pass is whole"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("full_lm", {"max_tokens": 500}, "context holds 128"),
        ("full_lm", {"order": "nearest"}, "one of threshold"),
        ("full_lm", {"threshold": 2}, "probability"),
        ("full_lm", {"steps": 0}, "integer >= 1"),
        ("full_lm", {"steps": 4, "k": 2}, "give one of them"),
        ("full_lm", {"cache": "all"}, "one of none"),
        ("full_lm", {"mirostat_tau": 3.0}, "previous token"),
        ("full_lm", {"dry_multiplier": 1.0}, "previous token"),
        ("full_lm", {"speculate": "lookup"}, "no option 'speculate'"),
        ("full_lm", {"treshold": 0.5}, "did you mean 'threshold'"),
        ("full_lm", {"mask": 5000}, "must be a token id"),
        ("full_lm", {"order": lambda guesses, least: []}, "at least one"),
        ("full_lm", {"order": lambda guesses, least: [99]}, "at least one"),
        ("blocks", {"cache": "dual"}, "exactly"),
        ("blocks", {"guidance": 1.0}, "leave it out"),
    ],
)
def test_what_makes_no_sense_is_refused(
    name: str, options: dict[str, Any], words: str, request: pytest.FixtureRequest
):
    lm = request.getfixturevalue(name)
    with pytest.raises((SettingsError, ContextError), match=words):
        lm.diffuse(SHORT, **options)
    assert pages_left(lm) == 0


def test_a_model_without_a_mask_token_says_so(tiny_lm: Any):
    for ask in (tiny_lm.diffuse, tiny_lm.stream_diffusion):
        with pytest.raises(SettingsError, match="no mask token"):
            ask(SHORT)
    with pytest.raises(SettingsError, match="no mask token"):
        tiny_lm.canvas(SHORT, 4)
    assert len(tiny_lm.diffuse(SHORT, mask=MASK, max_tokens=6, end=False).tokens) == 6


def test_of_a_block_that_reaches_beyond_the_text_only_the_text_is_told(blocks: Any) -> None:
    result = blocks.diffuse(SHORT, max_tokens=9, order="fixed", k=3, seed=2, end=False)
    places = [place.number for item in result.passes for place in item.places]
    steps = [step.position for item in result.passes for step in item.steps]
    assert max(places) == 8 and sorted(steps) == list(range(len(SHORT), len(SHORT) + 9))
    assert sum(item.set for item in result.passes) == 9 == len(result.tokens)
