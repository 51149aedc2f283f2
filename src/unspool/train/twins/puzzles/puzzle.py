"""What a puzzle is: questions without end, their answers, a judge, and a vocabulary of its own.

    puzzle = puzzle_named("sudoku")
    prompts, answers = puzzle.made(100, np.random.default_rng(0))     # texts
    puzzle.solved(prompts[0], answers[0])                             # True
    PuzzleBatches(puzzle, rows=256, seed=0).batch(3)                  # always the same one

All prompts of a puzzle are equally long, and so are all answers: a row is a prompt, its answer and
the end. Each letter is a token. Both twins, the causal and the masked one, are trained on the same
rows; the vocabulary has a mask in either case, so that they have as many weights.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unspool.errors import SettingsError
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.batches import Batch
from unspool.train.twins.puzzles.countdown import Countdown
from unspool.train.twins.puzzles.sudoku import Sudoku

END, MASK = "<end>", "<mask>"
HELD_OUT = 1 << 20  # the number of the first batch that is only judged by


class Puzzle(Protocol):
    """A kind of puzzle."""

    @property
    def name(self) -> str: ...

    @property
    def letters(self) -> str:
        """What its texts consist of."""
        ...

    @property
    def prompt(self) -> int:
        """Letters of a prompt."""
        ...

    @property
    def answer(self) -> int:
        """Letters of an answer."""
        ...

    def made(self, count: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """So many prompts and their answers."""
        ...

    def solved(self, prompt: str, answer: str) -> bool:
        """Whether an answer is right; there may be several that are."""
        ...


PUZZLES: dict[str, Callable[[str, str], Puzzle]] = {
    "sudoku": Sudoku.called,
    "sudoku4": Sudoku.called,
    "countdown": Countdown.called,
}


def puzzle_named(name: str) -> Puzzle:
    """`sudoku`, `sudoku:48` (so many empty cells), `sudoku:30-56`, `countdown`, `countdown:3`."""
    kind, _, more = name.partition(":")
    if kind not in PUZZLES:
        raise SettingsError(f"there is no puzzle {name!r}; there are {', '.join(PUZZLES)}")
    return PUZZLES[kind](kind, more)


def token_ids(puzzle: Puzzle) -> dict[str, int]:
    """The whole vocabulary: the end, the mask, and the letters."""
    return {token: number for number, token in enumerate((END, MASK, *puzzle.letters))}


def save_tokenizer(puzzle: Puzzle, folder: Path) -> Tokenizer:
    """The puzzle's vocabulary as files that transformers and `Tokenizer.from_file` read."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = {_spelled(token, byte_level): number for token, number in token_ids(puzzle).items()}
    library = Library(models.BPE(ids, []))
    library.pre_tokenizer = byte_level
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(each, special=True) for each in (END, MASK)])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "{END}", '
        f'"mask_token": "{MASK}", "add_bos_token": false}}\n'
    )
    return Tokenizer.from_file(folder)


def _spelled(token: str, byte_level: Any) -> str:
    """As byte-level vocabularies write it: a space is Ġ."""
    return token if len(token) > 1 else str(byte_level.pre_tokenize_str(token)[0][0])


def encoded(puzzle: Puzzle, texts: list[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Texts of one length as ids, one row each."""
    table = np.zeros(128, np.int64)
    for letter, number in token_ids(puzzle).items():
        if len(letter) == 1:
            table[ord(letter)] = number
    letters = np.frombuffer("".join(texts).encode("ascii"), np.uint8)
    return table[letters].reshape(len(texts), -1)


def decoded(puzzle: Puzzle, ids: np.ndarray[Any, np.dtype[np.int64]]) -> list[str]:
    """Rows of ids as texts; the end and the mask are shown as ?."""
    letters = {number: token for token, number in token_ids(puzzle).items()}
    return ["".join(t if len(t := letters[i]) == 1 else "?" for i in row) for row in ids.tolist()]


class PuzzleBatches:
    """New puzzles in every batch; batch n is a function of n, the seed and the rank. The next one
    is made while this one is learned from."""

    def __init__(self, puzzle: Puzzle, rows: int, seed: int = 0, rank: int = 0) -> None:
        self.puzzle, self.batch_size, self.seed, self.rank = puzzle, rows, seed, rank
        self.length = puzzle.prompt + puzzle.answer
        self._maker = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[Batch]] | None = None

    def rng(self, step: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.rank, step])

    def batch(self, step: int) -> Batch:
        known = self._next is not None and self._next[0] == step
        found = self._next[1].result() if self._next and known else self._made(step)
        self._next = step + 1, self._maker.submit(self._made, step + 1)
        return found

    def _made(self, step: int) -> Batch:
        import torch  # a server makes and judges puzzles without it

        prompts, answers = self.puzzle.made(self.batch_size, self.rng(step))
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        ends = np.full((self.batch_size, 1), token_ids(self.puzzle)[END])
        ids = torch.from_numpy(np.concatenate((encoded(self.puzzle, texts), ends), 1))
        counted = torch.zeros(self.batch_size, self.length, dtype=torch.bool)
        counted[:, self.puzzle.prompt - 1 :] = True
        return Batch(ids, counted)
