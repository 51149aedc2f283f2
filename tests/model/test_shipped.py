"""The models shipped with Unspool: found by name, complete, and able to solve Sudokus.

Solve rates are tested with a wide margin, because processors round differently: the diffusion model
solves nearly all boards with 40 empty cells, and three of five are required.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest

import unspool
from unspool.cli.main import _exit_code
from unspool.decoding.diffusion.options import make_plan
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.files.checkpoint import open_checkpoint
from unspool.model.hub.find import cached_models, find_model, plan_removal
from unspool.model.hub.inspect import summarize_model
from unspool.model.shipped import shipped_models
from unspool.model.weights import parameter_count
from unspool.train.export import export_folder
from unspool.train.twins.puzzles import puzzle_by_name

NAMES = ["sudoku", "sudoku-causal"]
MEMORY = 16 << 20
SUDOKU = puzzle_by_name("sudoku:40")


def boards(count: int) -> list[str]:
    return SUDOKU.generate(count, np.random.default_rng(7))[0]


def answers(name: str, prompts: list[str]) -> list[str]:
    with unspool.load(name, memory=MEMORY) as lm:
        if lm.config.sight == "causal":
            texts = lm.generate(prompts, max_tokens=SUDOKU.answer, temperature=0, progress=False)
        else:
            texts = lm.diffuse(prompts, max_tokens=SUDOKU.answer, threshold=0.99)
    return [text.text for text in texts]


def test_the_pair_is_complete_and_of_equal_size() -> None:
    assert list(shipped_models()) == NAMES
    diffusion, causal = (open_checkpoint(find_model(name, offline=True)).config for name in NAMES)
    assert (diffusion.sight, causal.sight) == ("whole", "causal")
    assert diffusion.mask_id is not None and causal.mask_id is None and not diffusion.shifted
    assert parameter_count(diffusion) == parameter_count(causal) > 3_000_000


def test_they_are_small() -> None:
    """They are in every installation: 4 bits per weight, one file of weights each."""
    for folder in shipped_models().values():
        assert sum(file.stat().st_size for file in folder.iterdir()) < 2_500_000, folder
        assert len(list(folder.glob("*.safetensors"))) == 1
        assert summarize_model(folder).kind == "MLX-4"  # shown by `unspool models list`


def test_a_path_of_the_same_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model("Sudoku", offline=True) == shipped_models()["sudoku"]
    (tmp_path / "sudoku").mkdir()
    assert find_model("sudoku", offline=True) == Path("sudoku")


def test_a_wrong_name_is_refused_and_the_right_one_said() -> None:
    with pytest.raises(ModelFileError, match="sudoko does not exist: did you mean sudoku"):
        find_model("sudoko", offline=True)
    with pytest.raises(UnspoolError, match="sudoku is shipped with Unspool"):
        plan_removal("sudoku")


def test_they_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert [model.name for model in cached_models() if model.source == "shipped"] == NAMES
    assert _exit_code(["models", "list"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if "shipped" in row]
    assert [row.split()[0] for row in rows] == NAMES and all("yes" in row for row in rows)
    assert _exit_code(["show", "sudoku"]) == 0
    output = capsys.readouterr().out
    assert "bidirectional" in output and "<mask>" in output


def test_the_command_line_runs_one(capsys: pytest.CaptureFixture[str]) -> None:
    (prompt,) = boards(1)
    command = ["run", "--model", "sudoku-causal", "-n", "81", "-t", "0", "-q", "--raw", prompt]
    assert _exit_code(command) == 0
    assert re.fullmatch("[1-9]{81}\n?", capsys.readouterr().out)


def test_the_canvas_has_the_model_s_length(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without max_tokens; a newline after a piped puzzle is not part of it."""
    (prompt,) = boards(1)
    with unspool.load("sudoku", memory=MEMORY) as lm:
        assert make_plan(lm, prompt, {}).length == SUDOKU.answer
        assert make_plan(lm, prompt, {"max_tokens": 7}).length == 7
    command = ["run", "--model", "sudoku", "--diffuse", "--steps", "1", "-q", "--raw"]
    assert _exit_code([*command, prompt]) == 0
    answer = capsys.readouterr().out
    assert 0 < len(answer.rstrip("\n")) <= SUDOKU.answer
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{prompt}\n".encode())))
    assert _exit_code([*command, "-"]) == 0
    assert capsys.readouterr().out == answer


def test_a_character_that_no_puzzle_has_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    (prompt,) = boards(1)
    zeros = prompt.replace(".", "0")
    assert _exit_code(["run", "--model", "sudoku", "--diffuse", "-q", "--raw", zeros]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "the character '0' is not in the model's vocabulary" in error
    assert "allowed are: . 1 2 3 4 5 6 7 8 9" in error


def test_backends_and_copies_agree(tmp_path: Path) -> None:
    """The native backend, plain torch, and an exported folder give the same probabilities."""
    (prompt,) = boards(1)
    copy = export_folder("sudoku", tmp_path / "copy", dtype="float16")
    log_probs = []
    for model, backend in (("sudoku", "auto"), ("sudoku", "torch"), (copy, "auto")):
        with (
            unspool.load(model, backend=backend, memory=MEMORY) as lm,
            lm.canvas(prompt, SUDOKU.answer) as canvas,
        ):
            logits = np.asarray(canvas.logits(), np.float64)
            log_probs.append(logits - np.logaddexp.reduce(logits, 1, keepdims=True))
    for other in log_probs[1:]:  # processors round 16-bit products differently
        assert float(np.abs(np.exp(log_probs[0]) - np.exp(other)).max()) < 0.05


def test_the_diffusion_model_solves_sudokus() -> None:
    prompts = boards(5)
    assert sum(map(SUDOKU.is_solved, prompts, answers("sudoku", prompts))) >= 3


def test_the_causal_model_writes_complete_boards() -> None:
    (answer,) = answers("sudoku-causal", boards(1))
    assert re.fullmatch("[1-9]{81}", answer)
