"""Puzzles: what is made is right, judges are exact, and twins decode in the order asked."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from unspool.errors import SettingsError
from unspool.train.learning.model_size import new_model
from unspool.train.learning.objectives import Masked, next_token
from unspool.train.twins import puzzles
from unspool.train.twins.twin import ORDERS, puzzle_config, solve

NAMES = ("sudoku:48", "sudoku4", "countdown", "countdown:3")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_made_is_solved(name: str):
    puzzle = puzzles.puzzle_by_name(name)
    prompts, answers = puzzle.generate(300, rng())
    assert {len(prompt) for prompt in prompts} == {puzzle.prompt_length}
    assert {len(answer) for answer in answers} == {puzzle.answer}
    assert all(map(puzzle.is_solved, prompts, answers))
    assert len(set(prompts)) > 250
    assert puzzle.generate(3, rng(5)) == puzzle.generate(3, rng(5))


def test_a_sudoku_must_hold_every_rule():
    sudoku = puzzles.Sudoku()
    prompts, answers = sudoku.generate(1, rng())
    answer = answers[0]
    assert sudoku.is_solved("." * 81, answer)
    swapped = answer[1] + answer[0] + answer[2:]  # right rows, wrong columns
    assert not sudoku.is_solved("." * 81, swapped)
    shifted = answer[9:18] + answer[:9] + answer[18:]  # right lines and boxes, other givens
    assert sudoku.is_solved("." * 81, shifted)
    assert not sudoku.is_solved(answer[:9] + "." * 72, shifted)
    other = "2" if answer[0] == "1" else "1"
    assert not sudoku.is_solved(prompts[0], other + answer[1:])
    assert not any(sudoku.is_solved(prompts[0], wrong) for wrong in (answer[:80], "x" * 81))
    assert len({tuple(board) for board in puzzles.base_boards().tolist()}) == 64
    for name, empty_cells in (("sudoku:48", {48}), ("sudoku:10-12", {10, 11, 12})):
        prompts, _ = puzzles.puzzle_by_name(name).generate(50, rng())
        assert {prompt.count(".") for prompt in prompts} == empty_cells


def test_a_countdown_uses_every_number_once():
    puzzle = puzzles.puzzle_by_name("countdown")
    arguments = "86,28,13,31= 96;"
    assert puzzle.is_solved(arguments, " 86+ 28=114, 31- 13= 18,114- 18= 96")
    for wrong in (
        " 86+ 28=114, 31- 13= 17,114- 18= 96",  # a wrong sum
        " 86+ 28=114, 28- 13= 15,114- 18= 96",  # 28 twice
        " 86+ 28=114, 31- 13= 18,114+ 18=132",  # another target
        " 86+ 28=114, 31- 13= 18,114- 18= 9?",
    ):
        assert not puzzle.is_solved(arguments, wrong)
    assert not puzzle.is_solved("10, 3, 5, 4= 30;", " 10/  3=  3,  3*  5= 15, 15+  4= 19")


def test_names_that_say_nothing_are_refused():
    for name in ("chess", "sudoku:many", "sudoku:70", "sudoku:9-3", "countdown:9", "countdown:x"):
        with pytest.raises(SettingsError):
            puzzles.puzzle_by_name(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_vocabulary_reads_and_writes_its_puzzles(name: str, tmp_path: Path):
    puzzle = puzzles.puzzle_by_name(name)
    tokenizer = puzzles.save_tokenizer(puzzle, tmp_path)
    prompts, answers = puzzle.generate(5, rng())
    for text in (*prompts, *answers):
        ids = puzzles.encode_texts(puzzle, [text])
        assert tokenizer.encode(text) == ids[0].tolist()
        assert tokenizer.decode(ids[0].tolist()) == text
        assert puzzles.decode_rows(puzzle, ids) == [text]
    assert tokenizer.vocab_size == len(puzzles.token_ids(puzzle))
    assert tokenizer.eos_id == 0 and tokenizer.special_tokens[puzzles.MASK] == 1


def test_both_twins_have_the_same_rows_and_as_many_weights():
    puzzle = puzzles.puzzle_by_name("sudoku")
    batch = puzzles.PuzzleBatches(puzzle, 4, seed=3).batch(7)
    again = puzzles.PuzzleBatches(puzzle, 4, seed=3).batch(7)
    assert torch.equal(batch.ids, again.ids)
    assert not torch.equal(batch.ids, puzzles.PuzzleBatches(puzzle, 4, seed=3).batch(8).ids)
    assert batch.ids.shape == (4, 163) and batch.loss_mask is not None
    assert batch.loss_mask.sum(1).tolist() == [82] * 4  # the answer and its end
    causal, full = (puzzle_config(puzzle, sight, 2, 32, 4) for sight in ("causal", "whole"))
    sizes = [sum(p.numel() for p in new_model(item).parameters()) for item in (causal, full)]
    assert sizes[0] == sizes[1]
    assert (causal.sight, causal.mask_id) == ("causal", None)
    assert (full.sight, full.mask_id) == ("whole", 1)
    for config, objective in ((causal, next_token), (full, Masked(1, weighting="plain"))):
        loss = objective(new_model(config), batch, torch.Generator().manual_seed(0))
        assert float(loss.mean) == pytest.approx(np.log(12), abs=0.3)


def test_every_order_fills_the_canvas():
    puzzle = puzzles.puzzle_by_name("countdown")
    prompts, _ = puzzle.generate(6, rng())
    model = new_model(puzzle_config(puzzle, "whole", 2, 32, 4), seed=1)
    with torch.no_grad():  # sure of something
        model.norm.weight.mul_(60)
    passes = {}
    for order in ORDERS:
        result = solve(model, puzzle, prompts, order)
        assert {len(answer) for answer in result.answers} == {puzzle.answer}
        passes[order] = result.passes
    assert passes["all"] == 1 and passes["left"] == passes["confident"] == puzzle.answer
    assert 1 <= passes["0.9"] <= passes["0.99"] <= puzzle.answer
    again = solve(model, puzzle, prompts, "random", seed=3).answers
    assert again == solve(model, puzzle, prompts, "random", seed=3).answers
    with pytest.raises(SettingsError, match="unknown order 'upwards'"):
        solve(model, puzzle, prompts, "upwards")


def test_a_causal_twin_writes_from_left_to_right():
    puzzle = puzzles.puzzle_by_name("countdown:3")
    prompts, _ = puzzle.generate(2, rng())
    model = new_model(puzzle_config(puzzle, "causal", 1, 32, 4), seed=1)
    result = solve(model, puzzle, prompts)
    text = torch.from_numpy(puzzles.encode_texts(puzzle, prompts))
    for _ in range(puzzle.answer):
        text = torch.cat((text, model(text)[:, -1].argmax(-1, keepdim=True)), 1)
    assert result.answers == puzzles.decode_rows(puzzle, text[:, puzzle.prompt_length :].numpy())
    with pytest.raises(SettingsError, match="left to right"):
        solve(model, puzzle, prompts, "confident")


def test_the_guide(capsys: pytest.CaptureFixture[str]):
    """The example of docs/how-to/train-a-masked-twin.md."""
    page = Path(__file__).parents[2] / "docs/how-to/train-a-masked-twin.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page.name, "exec"), {})
    assert "True" in capsys.readouterr().out
