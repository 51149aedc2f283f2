"""The same model on the torch backend and on the CUDA backend.

`device` says where the CUDA backend runs: on a GPU, or on the CPU by Triton's interpreter. The
torch backend is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from helpers import tiny
from helpers.paged_texts import Library, host, read, read_to_last
from unspool.backends.step import Backend, LoadedModel, StepBatch
from unspool.lm import LanguageModel
from unspool.loading import make_drafter_for
from unspool.model.files.checkpoint import fingerprint, load_transformer, open_checkpoint
from unspool.sampling import Chain, SamplingSettings
from unspool.sampling.picker import POSITION, SamplingRows, encode_settings

PAGES = 96


def family(name: str, folder: Path) -> Any:
    """A tiny checkpoint of a family."""
    tiny.save(name, folder)
    return open_checkpoint(folder)


def torch_model(checkpoint: Any, *, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    from unspool.backends.torch.backend import TorchModel

    return TorchModel(load_transformer(checkpoint, dtype=dtype, device=device))


def cuda_model(
    checkpoint: Any, *, dtype: str = "float32", device: str = "cpu", exact: bool = False
) -> LoadedModel:
    import torch

    from unspool.backends.cuda.load import load_weights
    from unspool.backends.cuda.model import CudaModel

    weights = load_weights(
        checkpoint, dtype=getattr(torch, dtype), device=torch.device(device), keep_packed=False
    )
    return CudaModel(weights, partial(fingerprint, checkpoint), exact=exact)


def backend(model: LoadedModel, context: int = 128, pages: int = PAGES) -> Backend:
    """With as many pages as were asked for."""
    config = model.config
    number = {"float32": 4}.get(model.precision, 2)
    page = 2 * config.layers * config.kv_width * 16 * number
    return model.backend(memory=pages * page, context=context)


def language_model(
    model: LoadedModel, tokenizer: Any = None, memory: int = 64 << 20
) -> LanguageModel:
    return LanguageModel(
        model,
        tokenizer,
        memory=memory,
        context=model.config.context,
        make_drafter=make_drafter_for,
    )


def distance(a: Any, b: Any) -> float:
    """How far apart two arrays are, as a share of the second's length."""
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


def read_in_many_ways(backend: Backend, vocabulary: int, long: int = 40) -> Any:
    """Logits of texts read as prompts, in chunks with a past, token by token and as drafts, alone
    and in batches; the same tokens for any backend."""
    library = Library(PAGES, vocabulary, seed=3)
    a, b, c = (library.text(length) for length in (long, long - 7, long - 2))
    logits = [*read(backend, [(a, long // 2)])]  # a prompt alone
    logits += read(backend, [(a, 1), (b, 17)])  # a token beside another's prompt
    logits += read(backend, [(b, 1)])  # a token alone
    logits += read(backend, [(c, 3), (a, 1), (b, 2)])  # drafts
    logits += read(backend, [(a, 1), (b, 1), (c, 1)])  # a token of each
    logits += read(backend, [(a, 1), (b, 1), (c, 18)])  # tokens that join a chunk with a past
    b.read -= 4  # rewound and read again
    logits += read(backend, [(b, 5), (c, 1), (a, 1)])
    d, e, f = (library.text(length) for length in (long, 3, 17))
    logits += read_to_last(backend, [(d, long - 9), (e, 2)])  # a prompt with one output
    logits += read_to_last(backend, [(e, 1), (d, 9), (f, 17)])
    return np.concatenate(logits)


def read_by_engine(model: LoadedModel) -> Any:
    """Logits of a prompt and of the two tokens after it; also for models with recurrent layers."""
    with language_model(model, memory=4 << 20) as lm:
        branch = lm.engine.open(list(range(3, 33)))
        logits = [lm.engine.extend(branch, num_logits=30)]
        logits += [lm.engine.extend(branch, [token]) for token in (40, 50)]
        logits += [lm.engine.extend(lm.engine.open(list(range(9, 38))))]  # of the last token only
        return np.concatenate([host(rows) for rows in logits])


def pick_rows(settings_list: Sequence[SamplingSettings], lengths: Sequence[int]) -> SamplingRows:
    """Sampling settings of rows whose next token is at these positions; without history."""
    floats, ints = [], []
    for number, (choice, length) in enumerate(zip(settings_list, lengths, strict=True)):
        row_floats, row_ints = encode_settings(choice, sample=number)
        row_ints[POSITION] = length
        floats.append(row_floats)
        ints.append(row_ints)
    return SamplingRows(np.array(floats), np.array(ints), np.empty(0, np.int64))


def check_picks(backend: Backend, batch: StepBatch) -> Any:
    """A step samples what the chain samples from the same logits; returns the tokens."""
    ran = backend.launch(batch).result()
    assert batch.sampling is not None
    logits = host(ran.logits)
    settings_list = [batch.sampling.settings(row) for row in range(len(logits))]
    inputs = [batch.sampling.row_input(row) for row in range(len(logits))]
    expected = Chain(settings_list).pick(logits, inputs)
    assert ran.tokens.tolist() == [choice.token for choice in expected]
    np.testing.assert_allclose(ran.logprobs, [choice.logprob for choice in expected], atol=1e-5)
    return ran.tokens


def written(lm: LanguageModel, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Generated texts of prompts that are submitted together, each with its index as the seed."""
    streams = [
        lm.stream(prompt, **{"seed": seed, "end": False, **options})
        for seed, prompt in enumerate(prompts)
    ]
    return [[step.token for step in stream] for stream in streams]


def prompts(count: int, vocabulary: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Random ones of any length."""
    chance = np.random.default_rng(seed)
    lengths = chance.integers(1, longest, count)
    return [chance.integers(0, vocabulary, length).tolist() for length in lengths]
