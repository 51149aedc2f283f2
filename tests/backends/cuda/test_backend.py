"""The GPU's backend by Triton's interpreter, on the CPU: the numbers of the plain backend.

Tiny models and few tokens, as the interpreter is slow; tests/gpu has every family on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.cuda_support import (
    PAGES,
    backend,
    check_picks,
    cuda_model,
    language_model,
    pick_rows,
    prompts,
    read_by_engine,
    read_in_many_ways,
    torch_model,
    written,
)
from helpers.paged_texts import (
    Library,
    RandomCheckpoint,
    batch_of,
    config,
    host,
    look,
    read,
    read_to_last,
)
from helpers.parity import ODD_SHAPES, check_seen, difference
from unspool.backends.cuda import attention
from unspool.backends.cuda.runner import LayerOps
from unspool.backends.step import ObserveRequest
from unspool.model.config import LayerShape, Recurrence, Rotary
from unspool.sampling import SamplingSettings
from unspool.sampling.picker import HISTORY_END

pytest.importorskip("triton")


def layer_shapes(*sizes: tuple[int, int, int, int]) -> tuple[LayerShape, ...]:
    names = ("heads", "kv_heads", "head_width", "ff_width")
    return tuple(LayerShape(**dict(zip(names, size, strict=True))) for size in sizes)


CLOSE = 2e-4
SMALL = config(layers=1, context=128)
MODELS: dict[str, dict[str, Any]] = {
    "as llama": {},
    "as gpt2": {
        "positions": "learned", "rotary": None, "norm": "layer", "qkv_bias": True,
        "out_bias": True, "ff_bias": True, "gated": False, "activation": "gelu_tanh",
        "width": 48, "kv_heads": 4, "tied": True,
    },
    "as gemma": {
        "windows": (7, 0), "layers": 2, "attention_softcap": 2.0, "logit_softcap": 3.0,
        "norm_after": True, "norm_plus_one": True, "embedding_scale": 5.0, "head_width": 12,
    },
    "as olmo": {"qk_norm": "whole", "norm_before": False, "norm_after": True},
    "as qwen": {"qk_norm": "head", "tied": True, "unrotated_layers": (0,)},
    "as neox": {"parallel": True, "rotary": Rotary(width=8), "norm": "layer", "out_bias": True},
    "as mixtral": {"experts": 4, "experts_per_token": 2, "expert_width": 24},
    "as gemma 4": {
        "layers": 3, "windows": (5, 0, 0), "kv_shared": 1, "keys_as_values": (0,),
        "value_norm": True, "qk_norm": "head", "token_width": 8, "layer_scale": True,
        "norm_after": True, "attention_scale": 1.0, "rotary": Rotary(width=8),
        "shapes": layer_shapes((4, 2, 8, 40), (2, 1, 16, 64), (4, 1, 16, 24)),
        "heads": 4, "kv_heads": 2, "head_width": 16, "ff_width": 64,
    },
    "as gemma 4 with experts": {
        "experts": 4, "experts_per_token": 2, "expert_width": 24, "norm_after": True,
        "dense_beside_experts": True,
    },
    "as gpt-oss": {
        "sinks": True, "qkv_bias": True, "out_bias": True, "windows": (7, 0), "layers": 2,
        "experts": 4, "experts_per_token": 2, "expert_width": 24, "router_bias": True,
        "expert_bias": True, "activation": "swiglu_clamped", "activation_limit": 1.0,
    },
    "as granite and ministral": {
        "residual_scale": 0.3, "logit_scale": 0.5, "query_growth": 0.3, "query_span": 5,
    },
    "as glm": {
        "attention_gate": True, "qk_norm": "head", "experts": 4, "experts_per_token": 2,
        "expert_width": 24, "router": "sigmoid", "selection_bias": True, "experts_scale": 1.5,
        "shared_width": 20, "shared_gated": False,
    },
    "as bert": {
        "sight": "whole", "norm_sums": True, "norm_before": False, "norm": "layer",
        "head_transform": True, "head_transform_bias": True, "activation": "gelu",
        "gated": False, "embedding_norm": True, "tied": True, "head_bias": True, "mask_id": 3,
    },
    "as modernbert": {"norm": "layer", "norm_bias": False, "embedding_norm": True},
    "sums to anything": ODD_SHAPES["sums to anything"],
}  # fmt: skip


# All of them run on a GPU (tests/gpu); by the interpreter those that have most in them.
_FAST = ("sums to anything",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in _FAST)) for name in MODELS]
)
def test_however_the_tokens_arrive(name: str):
    shape = config(**{"layers": 1, "context": 128, **MODELS[name]})
    expected, actual = (
        read_in_many_ways(backend(make(RandomCheckpoint(shape))), shape.vocab_size, long=30)
        for make in (torch_model, cuda_model)
    )
    assert expected.std() > 0.2, "a model that says nothing would prove nothing"
    assert difference(actual, expected) < CLOSE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in _FAST)) for name in MODELS]
)
def test_short_prompts_in_graphs(name: str, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, where graphs are captured: each token of a prompt is a row."""
    shape = config(**{"layers": 1, "context": 128, **MODELS[name]})
    running: Any = backend(cuda_model(RandomCheckpoint(shape)))
    prefill = running._prefill.run
    prefilled = list[int]()
    monkeypatch.setattr(running, "graph_tokens", 40)
    monkeypatch.setattr(
        running._prefill,
        "run",
        lambda chunk, *a: prefilled.append(len(chunk.tokens)) or prefill(chunk, *a),
    )
    expected = read_in_many_ways(
        backend(torch_model(RandomCheckpoint(shape))), shape.vocab_size, 30
    )
    assert difference(read_in_many_ways(running, shape.vocab_size, 30), expected) < CLOSE
    assert prefilled == [17], "beside one token, which has kernels of its own"


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What cuDNN computes in `attention._library_attention`."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1).float() for x in (key, value))
    scores = torch.einsum("qhd,khd->qhk", query.float(), key) * scale
    if causal:
        hidden = torch.ones(len(query), len(key), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    out = torch.einsum("qhk,khd->qhd", scores.softmax(-1), value)
    return out.to(query.dtype), scores.logsumexp(-1)


def test_long_chunks_by_the_library(monkeypatch: pytest.MonkeyPatch):
    """With a past and without, alone and beside other texts; a window's layers use our kernel."""
    changes = {**MODELS["as gemma"], "attention_softcap": 0.0, "head_width": 16}
    shape = config(**{"layers": 1, "context": 128, **changes})
    model = cuda_model(RandomCheckpoint(shape), dtype="float16")
    pasts, empty = list[int](), torch.empty

    def empty_of_nan(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    def logits() -> Any:
        texts, running = Library(PAGES, shape.vocab_size), backend(model)
        a, b = texts.text(52), texts.text(35)
        steps = [[(a, 17)], [(a, 18), (b, 17)], [(a, 17), (b, 1)], [(b, 17)]]
        return np.concatenate([rows for step in steps for rows in read(running, step)])

    def library(query: Any, key: Any, value: Any, scale: float, causal: bool) -> Any:
        pasts.append(0 if causal else len(key))
        assert len(query) % 16 == len(key) % 16 == 0
        assert query.isfinite().all(), "also before and after the chunk"
        return plain_attention(query, key, value, scale, causal)

    expected = logits()
    for constant, value in (("LONG_CHUNK", 17), ("LONG_PRODUCTS", 0), ("LONG_BLOCK", 16)):
        monkeypatch.setattr(attention, constant, value)
    monkeypatch.setattr(attention, "_has_fast_cudnn", lambda device: True)
    monkeypatch.setattr(attention, "_library_attention", library)
    monkeypatch.setattr(torch, "empty", empty_of_nan)
    np.testing.assert_allclose(logits(), expected, atol=0.02 * float(np.abs(expected).max()))
    assert pasts == [0, 0, 16, 0, 0, 32, 0, 16], "each chunk of at least 17 tokens"


def test_after_the_last_attention_only_rows_with_outputs_go_on(monkeypatch: pytest.MonkeyPatch):
    shape = config(layers=2, context=128)
    model, expected = cuda_model(RandomCheckpoint(shape)), torch_model(RandomCheckpoint(shape))
    rows: dict[int, list[int]] = {0: [], 1: []}
    multiply = LayerOps.multiply

    def counted(ops: Any, matrix: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        for number, layer in enumerate(model.weights.layers):
            if matrix is layer.feed.dense.down:
                rows[number].append(len(x))
        multiply(ops, matrix, x, out)

    monkeypatch.setattr(LayerOps, "multiply", counted)
    results = []
    for running in (backend(model), backend(expected)):
        library = Library(PAGES, shape.vocab_size)
        a, b = library.text(40), library.text(17)
        first = batch_of([(a, 20)])
        running.launch(replace(first, logits_indices=first.logits_indices[:0])).result()
        a.read += 20
        results.append(np.concatenate(read_to_last(running, [(a, 20), (b, 17)])))
    np.testing.assert_allclose(*results, atol=CLOSE)
    assert rows == {0: [20, 37], 1: [2]}


_DELTA = Recurrence(conv_kernel=4, key_heads=2, value_heads=4, key_width=8, value_width=12)
_MAMBA = Recurrence(
    conv_kernel=4, conv_bias=True, key_heads=1, value_heads=4, key_width=8, value_width=6,
    norm_groups=2,
)  # fmt: skip
BY_ENGINE: dict[str, dict[str, Any]] = {
    "as gemma 4": MODELS["as gemma 4"],
    "as qwen3.5": {
        "mixers": ("delta", "attention", "delta"), "recurrence": _DELTA, "attention_gate": True,
        "experts": 4, "experts_per_token": 2, "expert_width": 24, "shared_width": 20,
    },
    "as nemotron": {
        "mixers": ("mamba2", "attention", "none"), "feedless_layers": (0, 1),
        "recurrence": _MAMBA, "gated": False, "activation": "relu2",
    },
    "as lfm2": {
        "mixers": ("conv", "attention", "conv"), "recurrence": Recurrence(conv_kernel=3),
        "qk_norm": "head",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BY_ENGINE)
def test_a_prompt_and_two_tokens(name: str):
    shape = config(**{"layers": 3, "context": 128, **BY_ENGINE[name]})
    checkpoint = RandomCheckpoint(shape)
    expected, actual = (read_by_engine(make(checkpoint)) for make in (torch_model, cuda_model))
    assert expected.std() > 0.2, "a model that says nothing would prove nothing"
    assert difference(actual, expected) < CLOSE


@pytest.mark.parametrize("length", [9, 30])  # decoded, prefilled
def test_windows_in_both_directions(length: int):
    shape = config(
        layers=2, context=128, sight="whole", windows=(4, 0), norm="layer", norm_bias=False,
        embedding_norm=True, mask_id=3,
    )  # fmt: skip
    results = []
    for make in (torch_model, cuda_model):
        running, library = backend(make(RandomCheckpoint(shape))), Library(PAGES, shape.vocab_size)
        batch = batch_of([(library.text(length), length), (library.text(5), 5)])
        batch.visible_end = np.repeat([length, 5], [length, 5])
        results.append(host(running.launch(batch).result().logits))
    assert results[0].std() > 0.2, "a model that says nothing would prove nothing"
    assert difference(*results) < CLOSE


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("as gemma", marks=pytest.mark.slow),
        pytest.param("as neox", marks=pytest.mark.slow),
        "as llama",
    ],
)
def test_a_few_lines_are_each_what_they_are_alone(name: str):
    """Next tokens of several texts, and drafts, multiplied line by line: to the last bit."""
    shape = config(**{"layers": 1, "context": 128, **MODELS[name]})
    results = []
    for few in (8, 1):
        running: Any = backend(cuda_model(RandomCheckpoint(shape)))
        running.runner.max_fused_rows = 8
        library = Library(PAGES, shape.vocab_size)
        texts = [library.text(8), library.text(6)]
        for text in texts:
            look(running, [(text, 2)], None)
        running.runner.max_fused_rows = few
        if few > 1:
            parts = [[(texts[0], 3), (texts[1], 1)], [(text, 1) for text in texts]]
            results.append([np.concatenate(look(running, part, None)[0]) for part in parts])
        else:
            counts = ((0, 1), (0, 1), (0, 1), (1, 1), (0, 1), (1, 1))
            alone = [look(running, [(texts[number], n)], None)[0][0] for number, n in counts]
            results.append([np.concatenate(alone[:4]), np.concatenate(alone[4:])])
    for few, alone in zip(*results, strict=True):
        assert few.std() > 0.1 and np.array_equal(few, alone)


def test_looks_beside_a_text_that_is_written():
    results = []
    for make in (torch_model, cuda_model):
        running, library = backend(make(RandomCheckpoint(SMALL))), Library(PAGES, SMALL.vocab_size)
        a, b = library.text(20), library.text(21)
        look(running, [(a, 19)], None)
        taps = ObserveRequest(
            residuals=np.array([0, 3, 21]), attention=np.array([5, 21]), parts=np.array([4])
        )
        results.append(look(running, [(b, 21), (a, 1)], taps))
    expected, actual = results
    check_seen(actual, expected, CLOSE, CLOSE)


def test_what_a_drafting_head_reads_is_part_of_a_captured_step():
    """Before which layers it looks differs from head to head; one line, and several."""
    results = []
    for make in (torch_model, cuda_model):
        running: Any = backend(make(RandomCheckpoint(SMALL)))
        running.graph_tokens = 40  # as on a GPU: a short prompt runs in a graph, too
        library = Library(PAGES, SMALL.vocab_size)
        a, b, c = (library.text(length) for length in (6, 6, 17))
        vectors = []
        for parts, rows, layers in (
            ([(a, 2), (b, 1)], [0, 1, 2], (0, 1)),
            ([(a, 1), (b, 1)], [1], (1,)),
            ([(a, 1)], [0], (0, 1)),
            ([(c, 17)], [0, 16], (0, 1)),
        ):
            taps = ObserveRequest(residuals=np.array(rows), layers=layers)
            inside = look(running, parts, taps)[1]
            assert inside is not None
            there: Any = inside.residuals
            assert isinstance(there, np.ndarray) == (make is torch_model), "it stays on the device"
            vectors.append(np.asarray(there).ravel())
        results.append(np.concatenate(vectors))
    expected, actual = results
    assert expected.std() > 0.1 and difference(actual, expected) < CLOSE


def test_a_step_picks_what_the_chain_picks_and_the_next_may_begin_with_it():
    running = backend(cuda_model(RandomCheckpoint(SMALL)))
    library = Library(PAGES, SMALL.vocab_size)
    requested = [
        SamplingSettings(temperature=0),
        SamplingSettings(temperature=0.9, top_k=0, seed=5),
        SamplingSettings(temperature=1.3, top_p=0.8, min_p=0, seed=-7),
    ]
    texts, lengths = [library.text(20) for _ in requested], (2, 18, 3)
    batch = batch_of(list(zip(texts, lengths, strict=True)))
    last = batch.row_starts[1:] - 1
    sampled = replace(
        batch, sample_indices=last, sampling=pick_rows(requested, lengths), logits_indices=last
    )
    picked = check_picks(running, sampled)
    for number, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        text.read = length
        text.tokens[length] = -1 - number
    ahead = batch_of([(text, 1) for text in texts])
    second = running.launch(ahead).result()
    again = running.launch(replace(ahead, tokens=picked)).result()
    assert difference(second.logits, again.logits) == 0


def test_texts_through_the_engine_are_those_of_the_plain_backend():
    checkpoint = RandomCheckpoint(SMALL)
    requested = prompts(2, SMALL.vocab_size, longest=8)
    with (
        language_model(torch_model(checkpoint), memory=1 << 20) as cpu,
        language_model(cuda_model(checkpoint), memory=1 << 20) as gpu,
    ):
        options = {"max_tokens": 2, "repetition_penalty": 1.2}
        assert written(gpu, requested, **options) == written(cpu, requested, **options)


def test_a_backend_may_be_made_in_inference_mode():
    """As people do who load a model among torch code of their own."""
    with torch.inference_mode():
        running = backend(cuda_model(RandomCheckpoint(SMALL)))
    text = Library(PAGES, SMALL.vocab_size).text(20)
    for count in (17, 1):
        batch = batch_of([(text, count)])
        text.read += count
        last = batch.row_starts[1:] - 1
        pick = pick_rows([SamplingSettings(temperature=0, presence_penalty=1)], [text.read])
        pick = replace(pick, history=np.array(text.tokens[: text.read]))
        pick.ints[:, HISTORY_END] = text.read
        batch = replace(batch, sample_indices=last, sampling=pick, logits_indices=last)
        check_picks(running, batch)


def test_next_tokens_join_the_products_of_a_prompt_beside_them():
    """Without a graph, which would read all weights again; when exact, with the bits of a graph."""
    results = []
    for is_beside in (False, True):
        running: Any = backend(cuda_model(RandomCheckpoint(SMALL), exact=True))
        library = Library(PAGES, SMALL.vocab_size)
        a, b, c, d = (library.text(length) for length in (4, 7, 17, 2))
        read(running, [(a, 3), (b, 4)])
        if is_beside:
            running.runner.decode = pytest.fail  # the graph
        batch = batch_of([(a, 1), (b, 3), *([(c, 17), (d, 2)] if is_beside else [])])
        last = np.array([0, 3])  # of a and b
        pick = pick_rows([SamplingSettings(temperature=1, seed=n) for n in (1, 2)], (4, 7))
        batch = replace(batch, sample_indices=last, sampling=pick, logits_indices=last)
        result = running.launch(batch).result()
        results.append((result.tokens.tolist(), host(result.logits).tolist()))
    assert results[0] == results[1]


def test_exact_rows_are_the_same_to_the_last_bit_alone_and_beside_others():
    running = backend(cuda_model(RandomCheckpoint(SMALL), exact=True))
    results = []
    for others in (0, 1):
        library = Library(PAGES, SMALL.vocab_size)
        text, beside = library.text(20), [library.text(20) for _ in range(others)]
        rows = look(running, [(text, 17), *((matrix, 17) for matrix in beside)], None)[0]
        later = look(running, [(text, 1), *((matrix, 1) for matrix in beside)], None)[0]
        results.append(np.concatenate((rows[0], later[0])))
    assert np.array_equal(*results)
