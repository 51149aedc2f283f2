"""Forks, rewinds, drafts, grammars and looks on a GPU, while graphs run."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import tiny_gguf
from helpers.cuda_support import cuda_model, family, language_model, prompts, torch_model, written
from helpers.paged_texts import host
from helpers.parity import difference
from unspool.engine.request import DraftTree, Request
from unspool.lm import LanguageModel
from unspool.loading import open_tokenizer
from unspool.model.files.checkpoint import open_checkpoint

CLOSE = 2e-4
PROMPT = list(range(20, 60))
SECONDS = float(os.environ.get("UNSPOOL_STRESS_SECONDS", "15"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    """The same model with a vocabulary: plain on the CPU, and on the GPU."""
    path = tiny_gguf.write_tiny(tmp_path_factory.mktemp("tiny") / "model.gguf")
    checkpoint = open_checkpoint(path)
    words = open_tokenizer(checkpoint)
    with (
        language_model(torch_model(checkpoint), words) as cpu,
        language_model(cuda_model(checkpoint, device=device), words) as gpu,
    ):
        yield cpu, gpu


def nothing_leaks(lm: LanguageModel) -> None:
    engine = lm.engine

    def used() -> int:
        assert not engine.scheduler.tasks()
        engine.tree.index.clear()
        return engine.tree.pool.used

    assert engine.call(used) == 0


def test_steps_are_captured_anew(models: Any) -> None:
    """When all graphs are dropped, their memory is freed, and new graphs allocate again."""
    _, gpu = models
    first = written(gpu, [PROMPT], temperature=0, max_tokens=12)
    gpu.engine.call(gpu.engine.backend._graphs.clear)
    assert written(gpu, [PROMPT], temperature=0, max_tokens=12) == first


def walk(lm: LanguageModel, seed: int) -> list[Any]:
    """Branches that grow, fork, go back and end, as chance has it; all logits on the way."""
    chance, engine = random.Random(seed), lm.engine
    branches = [engine.open(PROMPT[: chance.randint(1, 40)])]
    result = [host(branches[0].append())]
    for _ in range(60):
        branch = chance.choice(branches)
        act = chance.random()
        if act < 0.5:
            new = [chance.randrange(256) for _ in range(chance.choice([1, 1, 1, 2, 5, 30]))]
            if branch.length + len(new) < 250:
                result.append(host(branch.append(new)))
        elif act < 0.7 and len(branches) < 8:
            branches.append(branch.fork())
        elif act < 0.9 and branch.length > 1:
            branch.rewind(chance.randint(1, branch.length))
        elif len(branches) > 1:
            branches.remove(branch)
            branch.release()
    for branch in branches:
        branch.release()
    return result


@pytest.mark.parametrize("seed", range(4))
def test_forks_and_rewinds(models: tuple[LanguageModel, LanguageModel], seed: int):
    cpu, gpu = models
    writing = [gpu.stream(PROMPT[:9], seed=n, end=False, max_tokens=200) for n in range(12)]
    assert difference(walk(gpu, seed), walk(cpu, seed)) < CLOSE
    for stream in writing:
        stream.close()
    nothing_leaks(gpu)


def test_drafts_leave_the_text_as_it_is(models: tuple[LanguageModel, LanguageModel]):
    _, gpu = models
    prompt_list = [[*ids, *ids, *ids] for ids in prompts(12, 256, longest=20)]
    for options in ({"temperature": 0}, {"temperature": 0.7, "top_k": 20}):
        without = written(gpu, prompt_list, max_tokens=40, **options)
        assert written(gpu, prompt_list, max_tokens=40, speculate="lookup", **options) == without


class DraftTrees:
    """Proposes a tree in which a wrong token stands before each right one, so that the right path
    leaves the row of its parent after every token, and forks of forks share a page."""

    def __init__(self, text: list[int]) -> None:
        self._text = text
        self.accepted: list[int] = []

    def propose(self, tokens: Sequence[int], most: int) -> DraftTree:
        nodes, parents, parent = list[int](), list[int](), -1
        for token in self._text[len(tokens) : len(tokens) + min(most, 4)]:
            nodes += [(token + 1) % 256, token]
            parents += [parent, parent]
            parent = len(nodes) - 1
        return DraftTree(nodes, parents)

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        self.accepted.append(accepted)
        return None


@pytest.mark.parametrize("length", [13, 15, 16, 17, 32])
def test_draft_trees_at_page_borders(models: tuple[LanguageModel, LanguageModel], length: int):
    """Partly filled pages are copied for side rows, and copies of copies, while graphs run."""
    _, gpu = models
    prompt_list = [PROMPT[:length], PROMPT[1 : length + 1], PROMPT[:length]]
    options: dict[str, Any] = {"temperature": 0.7, "max_tokens": 40}
    texts = written(gpu, prompt_list, **options)
    drafters: list[DraftTrees] = []

    def make(request: Request) -> DraftTrees:
        seed = request.settings.seed
        assert seed is not None
        drafters.append(DraftTrees([*prompt_list[seed], *texts[seed]]))
        return drafters[-1]

    for _ in range(2):  # the second time with captured graphs and cached pages
        assert written(gpu, prompt_list, speculate=make, **options) == texts
    assert len(drafters) == 6
    assert all(np.mean(drafter.accepted) > 3 for drafter in drafters)
    nothing_leaks(gpu)


def test_grammars_explanations_and_rare_stages_beside_the_others(
    models: tuple[LanguageModel, LanguageModel],
):
    cpu, gpu = models
    special: list[dict[str, Any]] = [
        {"regex": "[0-9]{12}"},
        {"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
        {"explain": True, "top": 3},
        {"typical_p": 0.8},
        {"dry_multiplier": 0.8},
        {"logit_bias": {7: 5.0, 9: -100.0}},
        {"mirostat_tau": 3.0},
        {"guard": "loop", "temperature": 0},
    ]
    others = [gpu.stream(PROMPT, seed=n, end=False, max_tokens=150) for n in range(24)]
    streams = [
        gpu.stream(PROMPT, seed=n, max_tokens=30, **options_) for n, options_ in enumerate(special)
    ]
    beside = [[step.token for step in stream] for stream in streams]
    texts = [[step.token for step in stream] for stream in others]
    for number, options_ in enumerate(special):
        alone = cpu.generate(PROMPT, seed=number, max_tokens=30, **options_)
        assert beside[number] == [step.token for step in alone.steps], options_
    assert texts == written(cpu, [PROMPT] * 24, max_tokens=150)
    assert gpu.tokenizer.decode(beside[0]).isdigit()


def test_looks_while_others_write(models: tuple[LanguageModel, LanguageModel]):
    cpu, gpu = models
    others = [gpu.stream(PROMPT, seed=n, end=False, max_tokens=150) for n in range(24)]
    for position in (3, 17, -1):
        actual, expected = gpu.look(PROMPT, position), cpu.look(PROMPT, position)
        assert difference(actual.attention, expected.attention) < CLOSE
        assert difference(actual.residuals, expected.residuals) < CLOSE
        assert difference(actual.parts, expected.parts) < CLOSE
        assert difference(actual.logits, expected.logits) < CLOSE
    result, expected = gpu.score(PROMPT), cpu.score(PROMPT)
    assert result.perplexity == pytest.approx(expected.perplexity, rel=1e-3)
    assert difference(gpu.embed(PROMPT), cpu.embed(PROMPT)) < CLOSE
    texts = [[step.token for step in stream] for stream in others]
    assert texts == written(cpu, [PROMPT] * 24, max_tokens=150)


def test_strategies_are_the_cpus(models: tuple[LanguageModel, LanguageModel]):
    cpu, gpu = models
    for ask in (
        lambda lm: lm.beam(PROMPT, beams=4, max_tokens=12).best.tokens,
        lambda lm: [options_.tokens for options_ in lm.samples(PROMPT, 9, seed=3, max_tokens=12)],
    ):
        assert ask(gpu) == ask(cpu)


def test_texts_that_are_left_take_nothing_with_them(models: tuple[LanguageModel, LanguageModel]):
    cpu, gpu = models
    streams = [gpu.stream(PROMPT, seed=n, end=False, max_tokens=60) for n in range(6)]
    for number in range(40):
        stream = gpu.stream(prompts(1, 256, seed=number)[0], seed=number, end=False)
        for _, _ in zip(range(number % 5), stream, strict=False):
            pass
        stream.close()
    texts = [[step.token for step in stream] for stream in streams]
    assert texts == written(cpu, [PROMPT] * 6, max_tokens=60)
    nothing_leaks(gpu)


def test_a_pool_too_small_for_all_makes_some_wait(tmp_path: Path, device: str):
    checkpoint = family("llama", tmp_path)
    prompt_list = prompts(40, 259, longest=60)
    options = {"temperature": 0, "max_tokens": 60}
    with (
        language_model(cuda_model(checkpoint, device=device), memory=1 << 19) as tight,
        language_model(cuda_model(checkpoint, device=device)) as roomy,
    ):
        assert tight.engine.backend.page_count < roomy.engine.backend.page_count
        assert written(tight, prompt_list, **options) == written(roomy, prompt_list, **options)
        nothing_leaks(tight)


def test_two_models_at_once(models: tuple[LanguageModel, LanguageModel], tmp_path: Path,
                            device: str):  # fmt: skip
    cpu, gpu = models
    checkpoint = family("qwen3", tmp_path)
    with language_model(cuda_model(checkpoint, device=device)) as other:
        expected = written(other, [PROMPT] * 4, max_tokens=60)
        streams = [
            lm.stream(PROMPT, seed=n, end=False, max_tokens=60)
            for n in range(4)
            for lm in (gpu, other)
        ]
        texts = [[step.token for step in stream] for stream in streams]
    assert texts[::2] == written(cpu, [PROMPT] * 4, max_tokens=60)
    assert texts[1::2] == expected


def test_random_stress(models: tuple[LanguageModel, LanguageModel]):
    """Random requests from several threads; each text is the same as alone."""
    cpu, gpu = models
    until, wrong = time.monotonic() + SECONDS, list[str]()
    settings: list[dict[str, Any]] = [
        {"temperature": 0}, {}, {"temperature": 1.2, "top_k": 0}, {"repetition_penalty": 1.3},
        {"regex": "[a-z]{1,20}"}, {"speculate": "lookup"}, {"explain": True},
    ]  # fmt: skip
    expected: dict[tuple[int, int], list[int]] = {}
    prompt_list = prompts(6, 256, longest=90, seed=5)
    for number, ids in enumerate(prompt_list):
        for kind, options_ in enumerate(settings):
            expected[number, kind] = written(cpu, [ids], max_tokens=50, end=True, **options_)[0]

    def work(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < until and not wrong:
            number, kind = chance.randrange(6), chance.randrange(len(settings))
            try:
                stream = gpu.stream(prompt_list[number], seed=0, max_tokens=50, **settings[kind])
                most = chance.choice([50, 50, 50, 3])
                result = [step.token for step, _ in zip(stream, range(most), strict=False)]
                stream.close()
                if result != expected[number, kind][:most]:
                    wrong.append(f"prompt {number}, settings {kind}: {result}")
                if chance.random() < 0.1:
                    walk(gpu, chance.randrange(1000))
                if chance.random() < 0.05:
                    gpu.look(prompt_list[number], chance.randrange(len(prompt_list[number])))
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
    nothing_leaks(gpu)


def test_memory_that_is_not_there_is_no_traceback(tmp_path: Path, device: str):
    """More than there is: fewer pages, or a sentence; never the library's own error."""
    import torch

    from unspool.errors import UnspoolError, UnspoolWarning

    checkpoint = family("llama", tmp_path)
    torch.cuda.set_per_process_memory_fraction(0.05)  # others may be on this GPU, too
    try:
        with (
            pytest.warns(UnspoolWarning, match="has no memory"),
            language_model(cuda_model(checkpoint, device=device), memory=1 << 38) as lm,
        ):
            assert np.isfinite(lm.generate(PROMPT, max_tokens=2, end=False).steps[0].logprob)
    except UnspoolError as error:
        assert "memory" in str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
