"""Bits per byte: by hand, by `score`, with a sliding context; likelihoods alone and in a batch."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unspool
from helpers import small_model as small
from unspool.cli.main import _exit_code
from unspool.errors import SettingsError, UnspoolError
from unspool.model.files.gguf import GGUFFile
from unspool.train.evaluation.bits_per_byte import bits_per_byte, score_continuations, windows
from unspool.train.export import export_folder
from unspool.train.pretrain import NewSettings
from unspool.train.running.events import RunEnded
from unspool.train.running.runs import Run
from unspool.train.scaling import study
from unspool.train.scaling.grid import GridTrainer, held_out_loss, shared_vocabulary
from unspool.train.scaling.study import PlannedRun

TEXT = "The people of the United States, and their union in 1999. " * 5


@pytest.fixture(scope="module", params=["torch", "native"])
def lm(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("judged")
    small.save_model(folder, max_position_embeddings=256)
    with unspool.load(folder, backend=request.param, memory=32 << 20) as result:
        yield result


def logprob(lm: Any, before: list[int], token: int) -> float:
    """By hand: all logits behind these tokens, and a softmax."""
    with lm.open_branch(before) as branch:
        logits = np.asarray(lm.engine.extend(branch)[-1], dtype=np.float64)
    return float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


def test_equal_to_score_and_to_a_sum_by_hand(lm: Any):
    text = TEXT[:120]
    ids = [lm.tokenizer.eos_id, *lm.tokenizer.encode(text)]
    result = bits_per_byte(lm, [text], progress=False)
    by_score = lm.score(ids)
    assert result.nats == pytest.approx(-by_score.total, rel=1e-4)
    by_hand = -sum(logprob(lm, ids[:n], ids[n]) for n in range(1, len(ids)))
    assert result.nats == pytest.approx(by_hand, rel=1e-4)
    assert (result.bytes, result.tokens, result.documents) == (120, len(ids) - 1, 1)
    assert result.bits_per_byte == pytest.approx(by_hand / math.log(2) / 120, rel=1e-4)
    assert result.perplexity == pytest.approx(math.exp(by_hand / (len(ids) - 1)), rel=1e-3)


def test_a_sliding_context(lm: Any):
    """Each token once, behind as many tokens as its window has: summed up one by one."""
    ids = [lm.tokenizer.eos_id, *lm.tokenizer.encode(TEXT[:150])]
    width, stride = 32, 12
    result = bits_per_byte(lm, [TEXT[:150]], context=width, stride=stride, progress=False)
    expected, done = 0.0, 1
    while done < len(ids):
        end = min(len(ids), done + (width if done == 1 else stride))
        start = max(0, end - 1 - width)
        expected -= sum(logprob(lm, ids[start:n], ids[n]) for n in range(done, end))
        done = end
    assert result.nats == pytest.approx(expected, rel=1e-4)
    assert result.tokens == len(ids) - 1


def test_documents_are_judged_apart(lm: Any):
    texts = ["The union.", "", "They've done it already!"]
    full = bits_per_byte(lm, texts, progress=False)
    parts = [bits_per_byte(lm, [text], progress=False) for text in texts if text]
    assert full.nats == pytest.approx(sum(part.nats for part in parts), rel=1e-5)
    assert full.documents == 2
    assert full.bytes == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize(
    ("length", "width", "stride"), [(2, 8, 4), (50, 8, 3), (50, 8, 8), (9, 8, 1)]
)
def test_windows_judge_every_token_once(length: int, width: int, stride: int):
    ids = list(range(length))
    result = windows(ids, width, stride)
    assert [token for _, target in result for token in target] == ids[1:]
    for number, (context, target) in enumerate(result):
        assert context[-1] + 1 == target[0]
        assert len(context) + len(target) - 1 <= width
        assert len(target) <= (width if number == 0 else stride)
    assert all(len(c) + len(t) - 1 == width for c, t in result[1:])


def test_many_likelihoods_are_those_of_each_alone(lm: Any):
    rng = np.random.default_rng(0)
    question = rng.integers(4, 290, 40).tolist()
    answers = [rng.integers(4, 290, int(n)).tolist() for n in (1, 3, 9)]
    pairs = [(question, answer) for answer in answers]
    pairs += [(rng.integers(4, 290, int(n)).tolist(), [7, 8]) for n in rng.integers(1, 90, 40)]
    best = int(np.argmax(np.asarray(_last_logits(lm, question))))
    pairs += [(question, [best]), (question, [])]
    result = score_continuations(lm, pairs)
    for (context, target), first in zip(pairs, result, strict=True):
        expected = [logprob(lm, [*context, *target[:n]], token) for n, token in enumerate(target)]
        assert first.logprobs == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert result[-2].greedy
    assert not all(first.greedy for first in result)
    assert result[-1].logprobs == ()


def _last_logits(lm: Any, tokens: list[int]) -> Any:
    with lm.open_branch(tokens) as branch:
        return lm.engine.extend(branch)[-1]


def test_long_continuations_come_in_pieces(lm: Any, monkeypatch: pytest.MonkeyPatch):
    ids = np.random.default_rng(1).integers(4, 290, 120).tolist()
    full = score_continuations(lm, [(ids[:2], ids[2:])])[0]
    monkeypatch.setattr("unspool.train.evaluation.bits_per_byte._MAX_LOGIT_ROWS", 16)
    pieces = score_continuations(lm, [(ids[:2], ids[2:]), (ids[:5], ids[5:9])])[0]
    assert pieces.logprobs == pytest.approx(full.logprobs, rel=1e-3, abs=1e-4)
    ids = np.random.default_rng(2).integers(4, 290, 300).tolist()
    # A context that is too long is cut at its beginning.
    result = score_continuations(lm, [(ids[:290], ids[290:292])])[0]
    assert result.logprobs[1] == pytest.approx(logprob(lm, ids[35:291], ids[291]), rel=1e-3)


def test_what_cannot_be_judged(lm: Any):
    with pytest.raises(SettingsError, match="no text to evaluate"):
        bits_per_byte(lm, ["", ""])
    with pytest.raises(SettingsError, match="got 99"):
        bits_per_byte(lm, ["a"], context=32, stride=99)
    with pytest.raises(SettingsError, match="at least one context token"):
        score_continuations(lm, [([], [1])])
    with pytest.raises(SettingsError, match="the model's context of 256"):
        score_continuations(lm, [([1], [2] * 300)])


# -- The commands as a person gives them: scaling, judge, export, on runs of a few seconds --------


WORDS = ("the", "people", "of", "these", "states", "have", "come", "together", "in", "peace")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    lines = (" ".join(rng.choice(WORDS) for _ in range(60)) for _ in range(150))
    path: Path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(".\n\n".join(lines))
    return path


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> GridTrainer:
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSPOOL_CACHE", str(folder / "cache"))
        vocabulary, size = shared_vocabulary([str(text)], folder / "tokenizer", 280)
    assert size == 280
    settings = NewSettings(
        data=(str(text),), held_out=0.1, tokenizer=str(vocabulary), device="cpu", keep=0
    )
    return GridTrainer(settings, size, length=32)


@pytest.fixture(scope="module")
def trained(runs: GridTrainer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of a grid."""
    folder: Path = tmp_path_factory.mktemp("runs") / "d1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSPOOL_CACHE", str(folder.parent / "cache"))
        planned = PlannedRun(1, 1, 8192, 1e9)
        loss = runs(planned, folder)
        run = Run.open(folder)
        assert loss == held_out_loss(run) < 5.5  # less than knowing nothing
        assert runs(planned, folder) == loss  # not trained again
    return run


def test_a_run_of_a_grid_keeps_its_finished_model(trained: Run):
    assert trained.state == "done"
    assert [saved.folder for saved in trained.checkpoints()] == [trained.final]
    assert not any(saved.resumable for saved in trained.checkpoints())


def test_a_run_that_was_stopped_is_told(
    runs: GridTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    ended = RunEnded("stopped", 3)
    monkeypatch.setattr("unspool.train.scaling.grid.train", lambda run, on_event: ended)
    with pytest.raises(UnspoolError, match="rerun the same command to resume"):
        runs(PlannedRun(1, 1, 8192, 1e9), tmp_path / "d1")


def test_judge_on_what_the_run_held_out(trained: Run, capsys: pytest.CaptureFixture[str]):
    assert _exit_code(["train", "judge", str(trained.folder), "--json", "-p", "the people"]) == 0
    result = json.loads(capsys.readouterr().out)["d1"]
    assert len(result["samples"]) == 1
    assert "text" not in result
    assert _exit_code(["train", "judge", str(trained.folder), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)["d1"]["text"]
    assert output["documents"] > 1
    logged = [line for line in trained.log() if "held_out_loss" in line][-1]
    # The trainer judges rows that begin in the middle of documents, so only about the same.
    assert output["loss"] == pytest.approx(logged["held_out_loss"], rel=0.1)


def test_judge_on_a_file(
    trained: Run, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "sheet.html"
    words = ["train", "judge", str(trained.folder), "--data", str(text), "--html", str(page)]
    assert _exit_code([*words, "-n", "4"]) == 0
    printed = capsys.readouterr().out
    size = len(text.read_bytes())
    assert f"bits per byte ({size:,} bytes" in printed
    assert "Once upon a time" in page.read_text()
    assert _exit_code(["train", "judge", str(trained.folder), "--data", "nowhere.txt"]) == 2


def test_export(trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What our own tokenizer and shape give is something that GGUF knows."""
    target = tmp_path / "model.gguf"
    assert _exit_code(["train", "export", str(trained.folder), str(target), "-t", "q4_0"]) == 0
    assert GGUFFile(target).metadata["general.architecture"] == "qwen3"
    assert "llama-cli" in capsys.readouterr().out
    assert _exit_code(["train", "export", str(trained.folder), str(target)]) == 2
    assert "--force" in capsys.readouterr().err
    assert _exit_code(["train", "export", str(trained.folder), str(tmp_path / "folder")]) == 0
    assert (tmp_path / "folder" / "model.safetensors").exists()


def test_scaling(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("UNSPOOL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    trained: list[str] = []

    def train(self: GridTrainer, run: PlannedRun, folder: Path) -> float:
        trained.append(folder.name)
        return 1.5 + 20 / run.parameters**0.3 + 60 / run.tokens**0.3

    monkeypatch.setattr(GridTrainer, "__call__", train)
    monkeypatch.setattr(study, "_STARTS", study._STARTS[::16])
    words = [
        "train", "scaling", str(text), "--budgets", "1e14,3e14,1e15", "--depths", "3,4,5",
        "--check", "3e15", "--vocab-size", "280", "--redraws", "2", "--epochs", "1e9",
        "--aspect", "64", "--fewest", "0.1",
    ]  # fmt: skip
    assert _exit_code(words) == 0
    printed = capsys.readouterr().out
    assert len(trained) == 10
    assert "d3-1e14" in printed
    assert "not part of the fit" in printed
    assert (tmp_path / "runs" / "scaling" / "scaling.svg").exists()
    assert _exit_code([*words, "--json"]) == 0
    assert len(trained) == 10  # all of it was there
    result = json.loads(capsys.readouterr().out)
    assert abs(result["check"]["error"]) < 0.02
    assert _exit_code([*words[:3], "--budgets", "1e12", "--name", "b", "--epochs", "1e9"]) == 2
    assert "a law needs 6" in capsys.readouterr().err
    assert _exit_code([*words[:3], "--budgets", "1e16", "--name", "c"]) == 2
    assert "repeat its text too often" in capsys.readouterr().err
    assert _exit_code([*words[:3], "--depths", "x"]) == 2
    assert "not a comma-separated list" in capsys.readouterr().err


# -- The examples of the guides to evaluation, export and scaling laws run -------------------------


GUIDES = Path(__file__).parents[2] / "docs" / "how-to"


@pytest.mark.parametrize("page", ["evaluate-a-model", "export-to-gguf", "fit-a-scaling-law"])
def test_the_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNSPOOL_RUNS", raising=False)
    small.save_model(tmp_path / "model")
    run = Run.create("runs/speeches", "new")
    checkpoint = run.folder / "checkpoints" / "000010"
    export_folder("model", checkpoint)
    (checkpoint / "training.json").write_text(json.dumps({"step": 10, "tokens": 100}))
    text = (GUIDES / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    if page == "fit-a-scaling-law":
        # 1e21 FLOP: some billions of parameters, as in the paper.
        assert re.search(r"\de\+09 parameters", capsys.readouterr().out)
