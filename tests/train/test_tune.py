"""Fine-tuning a tiny model: it learns, resumes exactly, and the result can be loaded."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers import tiny
from unspool.cli.main import _exit_code
from unspool.errors import SettingsError, UnspoolError
from unspool.model.adapters import read_adapter, write_adapter
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.learning.lora import (
    LoraConfig,
    adapter_of,
    add_lora,
    load_adapter,
    lora_modules,
    merge,
    switch_lora,
)
from unspool.train.running.events import Event, StepLogged
from unspool.train.running.runs import Run
from unspool.train.tuning.dpo import dpo_loss, log_probabilities
from unspool.train.tuning.grpo import advantages, grpo_losses
from unspool.train.tuning.tasks import Task, accuracy, load_reward_function
from unspool.train.tuning.tune import TuneSettings, new_run, settings_of, tune

ANSWERS = {"red": "stop", "green": "go", "yellow": "wait"}
QUICK = {"batch": 4, "rate": 2e-2, "length": 96, "save_every": 1000, "device": "cpu"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model with a vocabulary of bytes, and where prepared data and runs go."""
    folder = tmp_path_factory.mktemp("tune")
    tiny.save("llama", folder / "model")
    settings = TokenizerSettings(vocab_size=259)
    save_tokenizer_files(train_bpe([], settings), settings, folder / "model")
    rows = [{"prompt": p, "completion": c} for p, c in ANSWERS.items()] * 8
    write_rows(
        folder / "data.jsonl", [{**r, "prompt": f"{r['prompt']}{n}"} for n, r in enumerate(rows)]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSPOOL_CACHE", str(folder / "cache"))
        patch.setenv("UNSPOOL_RUNS", str(folder / "runs"))
        yield folder


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(here: Path, **changes: Any) -> TuneSettings:
    given = {"model": str(here / "model"), "data": (str(here / "data.jsonl"),), **QUICK, **changes}
    return TuneSettings(**given)


def logged(events: list[Event]) -> list[StepLogged]:
    return [event for event in events if isinstance(event, StepLogged)]


@pytest.mark.parametrize("lora", [4, 0])
def test_answers_are_learned_and_what_comes_out_writes_them(here: Path, lora: int) -> None:
    events: list[Event] = []
    expected = settings(here, lora=lora, steps=40, rate=2e-2 if lora else 5e-3)
    run = tune(expected, new_run(expected), events.append)
    losses = [event.loss for event in logged(events)]
    assert len(losses) == 40 and np.mean(losses[-5:]) < 0.25 * np.mean(losses[:3])
    assert run.state == "done" and run.final is not None
    lm = unspool.load(run.final, backend="torch")  # an adapter brings its model along
    before = unspool.load(here / "model", backend="torch")
    text = lm.chat_prompt("red9").ids + lm.tokenizer.encode("stop")
    now, then = (sum(model.score(text).logprobs[-4:]) for model in (lm, before))
    assert now > then + 5
    assert (lm.adapter is not None) == bool(lora)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(here: Path) -> None:
    full = tune(settings(here, lora=4, steps=8), new_run(settings(here, lora=4, steps=8)))
    parts = new_run(settings(here, lora=4, steps=8, save_every=3), here / "runs" / "parts")

    def stop(event: Event) -> None:
        if isinstance(event, StepLogged) and event.step == 3:
            parts.send_command("stop")

    tune(settings_of(parts), parts, stop)
    assert parts.state == "stopped"
    again = Run.open("parts")
    again.resume_here()
    tune(settings_of(again), again)
    files = [run.final / "adapter_model.safetensors" for run in (full, again) if run.final]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_dpo_makes_the_chosen_answer_likelier(here: Path) -> None:
    """Of the whole model; two processes tune a LoRA in test_parallel.py."""
    rows = [
        {"prompt": f"{p}{n}", "chosen": c, "rejected": "no idea"}
        for n in range(6)
        for p, c in ANSWERS.items()
    ]
    events: list[Event] = []
    data = (write_rows(here / "pairs.jsonl", rows),)
    expected = settings(here, kind="dpo", data=data, lora=0, steps=15, rate=1e-3)
    run = tune(expected, new_run(expected), events.append)
    report = logged(events)
    assert report[0].loss == pytest.approx(np.log(2), abs=1e-4)  # at first nothing has changed
    assert report[-1].loss < 0.3 and report[-1].extra["margin"] > 1
    assert report[-1].extra["accuracy"] == 1.0
    assert run.facts["kind"] == "dpo"


def test_grpo_learns_what_its_judge_likes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "my_judge.py").write_text(
        "def low(prompt, answer, row):\n"
        "    assert prompt == row['prompt']\n"
        "    return sum(c < 'a' for c in answer) / max(1, len(answer))\n"
    )
    monkeypatch.syspath_prepend(here)
    data = (write_rows(here / "asked.jsonl", [{"prompt": f"number {n}"} for n in range(8)]),)
    events: list[Event] = []
    expected = settings(
        here, kind="grpo", data=data, judge="my_judge:low", lora=0,
        steps=12, rate=3e-3, groups=4, answers=8, max_tokens=8, kl=0.01,
    )  # fmt: skip
    tune(expected, new_run(expected), events.append)
    rewards = [event.extra["reward"] for event in logged(events)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
    sys.modules.pop("my_judge", None)


def test_the_commands(here: Path) -> None:
    model, data = str(here / "model"), str(here / "data.jsonl")
    arguments = ["--model", model, "--data", data, "--lora", "2", "--steps", "2", "--name", "mine"]
    assert _exit_code(["train", "tune", *arguments, "--device", "cpu"]) == 0
    run = Run.open("mine")
    assert run.state == "done" and run.final is not None
    assert _exit_code(["train", "merge", str(run.final), str(here / "merged")]) == 0
    merged = unspool.load(here / "merged", backend="torch")
    adapted = unspool.load(run.final, backend="torch")
    text = [3, 4, 5, 6, 7]
    first_item, other = (model.score(text).logprobs[1:] for model in (merged, adapted))
    assert first_item == pytest.approx(other, abs=1e-4)
    arguments = ["run", "hi", "--raw", "-n", "2", "-m", model]
    for adapter in (run.final, run.folder, run.name):
        assert _exit_code([*arguments, "--adapter", str(adapter)]) == 0
    judged = [line["step"] for line in run.log() if "held_out_loss" in line]
    assert judged[:1] == [0], "the held-out loss is shown from the start"


def test_a_run_that_cannot_begin_leaves_nothing(here: Path) -> None:
    expected = settings(here, data=(str(here / "nowhere.jsonl"),))
    run = new_run(expected)
    with pytest.raises(UnspoolError, match="nowhere"):
        tune(expected, run)
    assert not run.folder.exists()


def test_a_task_asks_judges_and_counts() -> None:
    task = Task("family_relationships")
    rows, entries = task.rows(5, seed=1), task.entries(5, seed=1)
    assert [row["completion"] for row in rows] == [entry["answer"] for entry in entries]
    for entry in entries:
        assert task.reward(entry["question"], f" {entry['answer']}\n", entry) == 1.0
        assert task.reward(entry["question"], "a piano", entry) < 1.0
    with pytest.raises(UnspoolError, match="no task"):
        Task("flying")
    answers = [*(entry["answer"] for entry in entries[:3]), "nobody", "nobody"]
    knowing: Any = SimpleNamespace(
        chat=lambda arguments, **options: [SimpleNamespace(text=text) for text in answers]
    )
    assert accuracy(knowing, entries, task) == 0.6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": ()}, "--data or --task"),
        ({"kind": "dpo", "data": (), "task": "aiw"}, "pairs"),
        ({"kind": "grpo"}, "judge"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnspoolError, match=said):
        settings(tmp_path, **changes)
    with pytest.raises(UnspoolError, match="module:function"):
        load_reward_function("no_such_module:judge")


# -- LoRA -----------------------------------------------------------------------------------------


TOKENS = torch.tensor([[3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26]])


def transformer(here: Path) -> Any:
    return load_transformer(open_checkpoint(here / "model"))


def with_lora(here: Path, **settings: Any) -> Any:
    model = transformer(here)
    add_lora(model, LoraConfig(**{"rank": 4, **settings}))
    with torch.no_grad():
        for number, (_, module) in enumerate(lora_modules(model)):
            torch.manual_seed(number)
            module.up.normal_(std=0.1)
    return model


def test_it_begins_as_the_model_itself_and_trains_only_what_was_added(here: Path) -> None:
    plain, model = transformer(here), transformer(here)
    add_lora(model, LoraConfig(rank=4))
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=0)
    trained = [name for name, item in model.named_parameters() if item.requires_grad]
    assert trained and all(name.endswith((".down", ".up")) for name in trained)
    few = transformer(here)
    add_lora(few, LoraConfig(rank=4, layers=1, targets=("q",)))
    assert [name for name, _ in lora_modules(few)] == ["layers.3.attention.q.weight"]
    again = transformer(here)
    add_lora(again, LoraConfig(rank=4))  # the same seed, the same numbers
    for (_, first), (_, other) in zip(lora_modules(model), lora_modules(again), strict=True):
        torch.testing.assert_close(first.down, other.down, rtol=0, atol=0)


def test_what_was_trained_gives_pefts_logits_ours_and_those_of_the_merged_model(
    here: Path, tmp_path: Path
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    model = with_lora(here, alpha=10)
    with torch.no_grad():
        expected = model(TOKENS)
    write_adapter(adapter_of(model), tmp_path / "adapter", model.config)
    base = AutoModelForCausalLM.from_pretrained(here / "model")
    reference_model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(reference_model(TOKENS).logits, expected, rtol=0, atol=1e-4)
    merged = transformer(here)
    merge(merged, read_adapter(tmp_path / "adapter", merged.config))
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS), expected, rtol=0, atol=1e-4)
    lm = unspool.load(here / "model", backend="torch")
    lm.load_adapter("a", tmp_path / "adapter")
    with lm.open_branch(TOKENS[0].tolist(), "a") as branch:
        served = np.asarray(lm.engine.extend(branch, num_logits=TOKENS.shape[1]))
    np.testing.assert_allclose(served, expected[0].numpy(), atol=1e-4)


def test_it_can_be_switched_off_and_gone_on_with(here: Path) -> None:
    plain, model = transformer(here), with_lora(here)
    with torch.no_grad():
        on = model(TOKENS)
        switch_lora(model, False)
        torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=0)
        again = transformer(here)
        add_lora(again, LoraConfig(rank=4, alpha=1))  # another scale, the same product
        load_adapter(again, adapter_of(model))
        torch.testing.assert_close(again(TOKENS), on, rtol=0, atol=1e-5)
    other = transformer(here)
    add_lora(other, LoraConfig(rank=5))
    with pytest.raises(SettingsError, match="another rank"):
        load_adapter(other, adapter_of(model))


def test_what_lora_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="choose from"):
        LoraConfig(targets=("q", "embed"))
    with pytest.raises(SettingsError, match="rank"):
        LoraConfig(rank=0)


def test_dpo_is_the_papers_formula() -> None:
    sums = torch.tensor([[-12.0, -15.0, -13.0, -14.0], [-3.0, -2.5, -3.5, -2.0]]).T
    arguments = [sums[n] for n in range(4)]
    losses, margin = dpo_loss(*arguments, beta=0.3)
    for row in range(2):
        selected, rejected, chosen_before, rejected_before = (
            float(item[row]) for item in arguments
        )
        output = 0.3 * ((selected - chosen_before) - (rejected - rejected_before))
        assert float(margin[row]) == pytest.approx(output, rel=1e-6)
        assert float(losses[row]) == pytest.approx(math.log(1 + math.exp(-output)), rel=1e-6)
    smoothed, _ = dpo_loss(*arguments, beta=0.3, smoothing=0.1)
    swapped, _ = dpo_loss(arguments[1], arguments[0], arguments[3], arguments[2], beta=0.3)
    torch.testing.assert_close(smoothed, 0.9 * losses + 0.1 * swapped)


def test_log_probabilities_are_those_of_the_logits(here: Path) -> None:
    model = transformer(here)
    loss_mask = torch.zeros(1, TOKENS.shape[1] - 1, dtype=torch.bool)
    loss_mask[0, 4:8] = True
    result = log_probabilities(model, TOKENS, loss_mask)
    expected = model(TOKENS[:, :-1]).log_softmax(-1).gather(2, TOKENS[:, 1:, None])[..., 0]
    torch.testing.assert_close(result, expected * loss_mask, rtol=0, atol=1e-4)


def test_advantages_are_deviations_of_the_group() -> None:
    result = advantages(torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    assert result[0].tolist() == pytest.approx([-0.866, 0.866, 0.866, -0.866], abs=1e-3)
    assert result[1].tolist() == [0, 0, 0, 0]  # nothing to learn where all are alike


def test_grpo_is_the_papers_formula() -> None:
    now = torch.tensor([[-1.0, -2.0], [-1.0, -0.1]], requires_grad=True)
    before, reference = torch.tensor([[-1.1, -1.0], [-2.0, -0.2]]), torch.full((2, 2), -1.5)
    gain = torch.tensor([0.7, -1.3])
    losses = grpo_losses(now, before, gain, low=0.2, high=0.3, reference=reference, kl_weight=0.4)
    for row in range(2):
        for place in range(2):
            p, old, ref = (math.exp(float(t[row, place])) for t in (now, before, reference))
            ratio, worth = p / old, float(gain[row])
            bounded = min(max(ratio, 0.8), 1.3)
            kl = ref / p - math.log(ref / p) - 1
            output = -min(ratio * worth, bounded * worth) + 0.4 * kl
            assert float(losses[row, place]) == pytest.approx(output, rel=1e-5)
    plain = grpo_losses(now, before, gain, low=0.2, high=0.3)
    plain.sum().backward()
    assert now.grad is not None
    assert now.grad[1, 0] != 0 and float(now.grad[0, 1]) != 0
    # A token that has become likelier than allowed gains nothing more.
    far = torch.tensor([[0.0]], requires_grad=True)
    grpo_losses(far, torch.tensor([[-1.0]]), torch.tensor([1.0])).sum().backward()
    assert far.grad is not None and float(far.grad) == 0
