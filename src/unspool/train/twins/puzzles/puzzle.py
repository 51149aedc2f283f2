"""Puzzles: generated prompts and answers, a verifier, and a character vocabulary.

    puzzle = puzzle_named("sudoku")
    prompts, answers = puzzle.made(100, np.random.default_rng(0))     # texts
    puzzle.solved(prompts[0], answers[0])                             # True
    PuzzleBatches(puzzle, rows=256, seed=0).batch(3)                  # a function of the step

All prompts of a puzzle have the same length, and all answers too: a row is a prompt, its answer and
the end token. Each character is a token. The causal and the masked model are trained on the same
rows; the vocabulary always has a mask token, so that both have the same number of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unspool.errors import SettingsError
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.batches import TrainingBatch
from unspool.train.twins.puzzles.countdown import Countdown
from unspool.train.twins.puzzles.sudoku import Sudoku

END, MASK = "<end>", "<mask>"
HELD_OUT = 1 << 20  # number of the first batch for evaluation


class Puzzle(Protocol):
    """A kind of puzzle."""

    @property
    def name(self) -> str: ...

    @property
    def letters(self) -> str:
        """All characters of its texts."""
        ...

    @property
    def prompt_length(self) -> int:
        """Length of a prompt."""
        ...

    @property
    def answer(self) -> int:
        """Length of an answer."""
        ...

    def generate(self, count: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """Generate `count` prompts and their answers."""
        ...

    def is_solved(self, prompt: str, answer: str) -> bool:
        """Whether an answer is correct; a prompt may have several correct answers."""
        ...


PUZZLES: dict[str, Callable[[str, str], Puzzle]] = {
    "sudoku": Sudoku.from_name,
    "sudoku4": Sudoku.from_name,
    "countdown": Countdown.from_name,
}


def puzzle_by_name(name: str) -> Puzzle:
    """Puzzle by name: `sudoku`, `sudoku:48` (empty cells), `sudoku:30-56`, `countdown:3`, ..."""
    kind, _, options = name.partition(":")
    if kind not in PUZZLES:
        raise SettingsError(f"unknown puzzle {name!r}; choose from {', '.join(PUZZLES)}")
    return PUZZLES[kind](kind, options)


def token_ids(puzzle: Puzzle) -> dict[str, int]:
    """The vocabulary: end token, mask token, and the characters."""
    return {token: number for number, token in enumerate((END, MASK, *puzzle.letters))}


def save_tokenizer(puzzle: Puzzle, folder: Path) -> Tokenizer:
    """Write the vocabulary as a tokenizer for transformers and `Tokenizer.from_file`."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = {_byte_level_token(t, byte_level): number for t, number in token_ids(puzzle).items()}
    library = Library(models.BPE(ids, []))
    library.pre_tokenizer = byte_level
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True) for token in (END, MASK)])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "{END}", '
        f'"mask_token": "{MASK}", "add_bos_token": false}}\n'
    )
    return Tokenizer.from_file(folder)


def _byte_level_token(token: str, byte_level: Any) -> str:
    """A token as byte-level vocabularies write it: a space is Ġ."""
    return token if len(token) > 1 else str(byte_level.pre_tokenize_str(token)[0][0])


def encode_texts(puzzle: Puzzle, texts: list[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Encode texts of one length: ids [texts, length]."""
    table = np.zeros(128, np.int64)
    for letter, number in token_ids(puzzle).items():
        if len(letter) == 1:
            table[ord(letter)] = number
    letters = np.frombuffer("".join(texts).encode("ascii"), np.uint8)
    return table[letters].reshape(len(texts), -1)


def decode_rows(puzzle: Puzzle, ids: np.ndarray[Any, np.dtype[np.int64]]) -> list[str]:
    """Decode rows of ids; end and mask tokens become "?"."""
    letters = {number: token for token, number in token_ids(puzzle).items()}
    return ["".join(t if len(t := letters[i]) == 1 else "?" for i in row) for row in ids.tolist()]


class PuzzleBatches:
    """New puzzles in every batch; batch n is a function of n, the seed and the rank.

    A thread generates the next batch during training on the current one.
    """

    def __init__(self, puzzle: Puzzle, rows: int, seed: int = 0, rank: int = 0) -> None:
        self.puzzle, self.batch_size, self.seed, self.rank = puzzle, rows, seed, rank
        self.length = puzzle.prompt_length + puzzle.answer
        self._maker = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[TrainingBatch]] | None = None

    def rng(self, step: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.rank, step])

    def batch(self, step: int) -> TrainingBatch:
        is_ready = self._next is not None and self._next[0] == step
        batch = self._next[1].result() if self._next and is_ready else self._generate(step)
        self._next = step + 1, self._maker.submit(self._generate, step + 1)
        return batch

    def _generate(self, step: int) -> TrainingBatch:
        import torch  # lazily: a server generates and verifies puzzles without torch

        prompts, answers = self.puzzle.generate(self.batch_size, self.rng(step))
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        ends = np.full((self.batch_size, 1), token_ids(self.puzzle)[END])
        ids = torch.from_numpy(np.concatenate((encode_texts(self.puzzle, texts), ends), 1))
        loss_mask = torch.zeros(self.batch_size, self.length, dtype=torch.bool)
        loss_mask[:, self.puzzle.prompt_length - 1 :] = True
        return TrainingBatch(ids, loss_mask)
