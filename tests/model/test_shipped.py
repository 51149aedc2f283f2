"""The models that come with Unspool: found by name, whole, and good at their puzzles.

What a trained pair can do is asked with a wide margin, because another processor rounds in another
way: of boards with 40 empty cells the twin of any order solves nearly all, and three of five are
asked for.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unspool
from unspool.cli.main import _exit_code
from unspool.decoding.diffusion_options import make_plan
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.checkpoint import open_checkpoint
from unspool.model.glance import glance
from unspool.model.hub import cached_models, find_model
from unspool.model.removing import removal
from unspool.model.shipped import shipped_models
from unspool.model.weights import parameter_count
from unspool.train.export import export_folder
from unspool.train.twins.puzzles.puzzle import puzzle_named

KINDS = ("sudoku", "countdown")
NAMES = sorted(f"{kind}{order}" for kind in KINDS for order in ("", "-causal"))
MEMORY = 16 << 20
PUZZLES = {"sudoku": "sudoku:40", "countdown": "countdown"}


def made(kind: str, count: int) -> list[str]:
    return puzzle_named(PUZZLES[kind]).made(count, np.random.default_rng(7))[0]


def answers(name: str, prompts: list[str], **options: Any) -> list[str]:
    """As people ask for them: through the engine, by the model's name."""
    puzzle = puzzle_named(name.partition("-")[0])
    with unspool.load(name, memory=MEMORY, **options) as lm:
        if lm.config.sight == "causal":
            texts = lm.generate(prompts, max_tokens=puzzle.answer, temperature=0, progress=False)
        else:
            texts = lm.diffuse(prompts, max_tokens=puzzle.answer, threshold=0.99)
    return [text.text for text in texts]


def test_all_of_them_are_here_and_as_large_as_each_other() -> None:
    assert list(shipped_models()) == NAMES
    for kind in KINDS:
        whole, causal = (
            open_checkpoint(find_model(name, offline=True)).config
            for name in (kind, f"{kind}-causal")
        )
        assert (whole.sight, causal.sight) == ("whole", "causal")
        assert whole.mask_id is not None and causal.mask_id is None and not whole.shifted
        assert parameter_count(whole) == parameter_count(causal) > 3_000_000


def test_they_are_small() -> None:
    """They are in every installation: 8 bits a weight, and one file of weights each."""
    for folder in shipped_models().values():
        assert sum(file.stat().st_size for file in folder.iterdir()) < 4_500_000, folder
        assert len(list(folder.glob("*.safetensors"))) == 1
        assert glance(folder).kind == "MLX-8"  # what `unspool models list` shows


def test_a_path_of_the_same_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model("Sudoku", offline=True) == shipped_models()["sudoku"]
    (tmp_path / "sudoku").mkdir()
    assert find_model("sudoku", offline=True) == Path("sudoku")


def test_a_wrong_name_is_refused_and_the_right_one_said() -> None:
    with pytest.raises(ModelFileError, match="sudoko does not exist: did you mean sudoku"):
        find_model("sudoko", offline=True)
    with pytest.raises(UnspoolError, match="sudoku is a part of Unspool"):
        removal("sudoku")


def test_they_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert [model.name for model in cached_models() if model.source == "shipped"] == NAMES
    assert _exit_code(["models", "list"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if "shipped" in row]
    assert [row.split()[0] for row in rows] == NAMES and all("yes" in row for row in rows)
    assert _exit_code(["show", "countdown"]) == 0
    told = capsys.readouterr().out
    assert "over the whole text" in told and "<mask>" in told


def test_the_command_line_runs_one(capsys: pytest.CaptureFixture[str]) -> None:
    (prompt,) = made("countdown", 1)
    asked = ["run", "--model", "countdown-causal", "-n", "35", "-t", "0", "-q", "--raw", prompt]
    assert _exit_code(asked) == 0
    assert 0 < len(capsys.readouterr().out.rstrip("\n")) <= 35


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_as_many_as_the_model_fills(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being told how many; a line end behind a piped puzzle is no part of it."""
    (prompt,) = made(kind, 1)
    with unspool.load(kind, memory=MEMORY) as lm:
        assert make_plan(lm, prompt, {}).length == puzzle_named(kind).answer
        assert make_plan(lm, prompt, {"max_tokens": 7}).length == 7
    command = ["run", "--model", kind, "--diffuse", "--steps", "1", "-q", "--raw"]
    assert _exit_code([*command, prompt]) == 0
    answer = capsys.readouterr().out
    assert 0 < len(answer.rstrip("\n")) <= puzzle_named(kind).answer
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{prompt}\n".encode())))
    assert _exit_code([*command, "-"]) == 0
    assert capsys.readouterr().out == answer


def test_a_character_that_no_puzzle_has_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    (prompt,) = made("sudoku", 1)
    zeros = prompt.replace(".", "0")
    assert _exit_code(["run", "--model", "sudoku", "--diffuse", "-q", "--raw", zeros]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "the character '0' is not in the model's vocabulary" in told
    assert "allowed are: . 1 2 3 4 5 6 7 8 9" in told


@pytest.mark.parametrize("kind", KINDS)
def test_backends_and_copies_agree(kind: str, tmp_path: Path) -> None:
    """The native backend, plain torch, and the folder written once more: the same probabilities."""
    (prompt,) = made(kind, 1)
    copy = export_folder(kind, tmp_path / "copy", dtype="float16")
    seen = []
    for model, backend in ((kind, "auto"), (kind, "torch"), (copy, "auto")):
        with (
            unspool.load(model, backend=backend, memory=MEMORY) as lm,
            lm.canvas(prompt, puzzle_named(kind).answer) as canvas,
        ):
            logits = np.asarray(canvas.logits(), np.float64)
            seen.append(logits - np.logaddexp.reduce(logits, 1, keepdims=True))
    for other in seen[1:]:  # processors multiply 16 bits in ways of their own
        assert float(np.abs(np.exp(seen[0]) - np.exp(other)).max()) < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_go_through_the_engine(name: str) -> None:
    puzzle = puzzle_named(name.partition("-")[0])
    for answer in answers(name, made(puzzle.name, 2)):
        assert len(answer) <= puzzle.answer and set(answer) <= set(puzzle.letters)


def test_puzzles_are_made_and_judged_without_torch() -> None:
    code = "import sys, unspool.serve.puzzles; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- what the trained weights can do ------------------------------------------------------------


def test_the_whole_twin_solves_sudokus() -> None:
    prompts = made("sudoku", 5)
    solved = map(puzzle_named("sudoku").solved, prompts, answers("sudoku", prompts))
    assert sum(solved) >= 3


def test_the_causal_twin_writes_whole_boards() -> None:
    (answer,) = answers("sudoku-causal", made("sudoku", 1))
    assert re.fullmatch("[1-9]{81}", answer)


def test_the_causal_twin_reaches_numbers() -> None:
    prompts = made("countdown", 8)
    solved = map(puzzle_named("countdown").solved, prompts, answers("countdown-causal", prompts))
    assert sum(solved) >= 4
