"""Drafts from a stored corpus: what followed, elsewhere, where it had just read the same words.

    corpus = Corpus(documents)                       # lists of token ids; indexed once
    lm.generate(prompt, speculate=lambda request: CorpusDrafter(corpus))

The index is the order of all places of the corpus by what stands before them, read backwards (a
suffix array of the reversed corpus, to a fixed depth). The places before which the longest end of
a text stands are then neighbours in it, found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import SettingsError

LONGEST_MATCH = 8  # tokens before a place that the order looks at: a power of two
SHORTEST_MATCH = 2
_VOTERS = 64  # places asked for what follows, where many are alike
_BORDER = -1  # between documents: no text holds it, so no match and no draft crosses it


def corpus_file(path: str | Path) -> Path:
    """The path of a file that is there."""
    if not Path(path).is_file():
        raise SettingsError(f"{path}: there is no such file to take drafts from")
    return Path(path)


class Corpus:
    """Token ids of many documents, ordered for looking up; never changes, shared by requests."""

    def __init__(self, documents: Iterable[Sequence[int] | npt.NDArray[Any]]) -> None:
        parts: list[npt.NDArray[np.int32]] = []
        for document in documents:
            ids = np.asarray(document, np.int64)
            if ids.ndim != 1 or (ids.size and (ids.min() < 0 or ids.max() >= 1 << 31)):
                raise SettingsError("a corpus is made of documents, each a list of token ids")
            parts += [ids.astype(np.int32), np.array([_BORDER], np.int32)]
        self.tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
        self._backwards = np.ascontiguousarray(self.tokens[::-1])
        self._order = _order(self._backwards, LONGEST_MATCH)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: Any) -> Corpus:
        """A text file, or a .npy file of token ids."""
        file = corpus_file(path)
        if file.suffix == ".npy":
            try:
                return cls([np.load(file, allow_pickle=False)])
            except (ValueError, OSError) as error:
                raise SettingsError(f"{file}: cannot be read as token ids ({error})") from error
        try:
            return cls([tokenizer.encode(file.read_text(encoding="utf-8"))])
        except UnicodeDecodeError as error:
            raise SettingsError(f"{file}: is no UTF-8 text, nor a .npy file of ids") from error

    def following(self, tokens: Sequence[int], most: int) -> list[int]:
        """What followed where the longest end of these tokens stood; empty if nowhere."""
        wanted = [int(token) for token in tokens[-LONGEST_MATCH:]][::-1]
        if not len(self._order) or len(wanted) < SHORTEST_MATCH or most <= 0:
            return []
        place = bisect_left(self._order, wanted, key=self._before(LONGEST_MATCH))
        near = (n for n in (place - 1, place) if 0 <= n < len(self._order))
        length = max(self._common(wanted, int(self._order[n])) for n in near)
        if length < SHORTEST_MATCH:
            return []
        key = self._before(length)
        first = bisect_left(self._order, wanted[:length], key=key)
        end = bisect_right(self._order, wanted[:length], key=key)
        return self._continued(self._order[first:end], most)

    def _before(self, length: int) -> Any:
        """Gives what stands before a place of the order, nearest first."""
        backwards = self._backwards

        def key(start: Any) -> list[int]:
            found: list[int] = backwards[start : start + length].tolist()
            return found

        return key

    def _common(self, wanted: list[int], start: int) -> int:
        found = self._before(len(wanted))(start)
        same = 0
        for one, other in zip(wanted, found, strict=False):
            if one != other:
                break
            same += 1
        return same

    def _continued(self, starts: npt.NDArray[np.int64], most: int) -> list[int]:
        """What most of these places go on with; of those, as the last one does."""
        if len(starts) > _VOTERS:
            starts = starts[np.linspace(0, len(starts) - 1, _VOTERS).astype(np.int64)]
        places = np.sort(len(self.tokens) - starts)
        places = places[places < len(self.tokens)]
        if not len(places):
            return []
        votes = Counter(self.tokens[places].tolist())
        best = max(votes, key=lambda token: (token != _BORDER, votes[token]))
        place = int(places[self.tokens[places] == best][-1])
        draft: list[int] = self.tokens[place : place + most].tolist()
        return draft[: draft.index(_BORDER)] if _BORDER in draft else draft


def _order(tokens: npt.NDArray[np.int32], depth: int) -> npt.NDArray[np.int64]:
    """Places ordered by the `depth` tokens from each on: ranks of pairs, then of pairs of pairs."""
    count = len(tokens)
    if not count:
        return np.empty(0, np.int64)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1  # 0: behind the end
    step = 1
    while step < depth:
        behind = np.zeros(count, np.int64)
        behind[:-step] = rank[step:] if step < count else rank[:0]
        pairs = rank * (count + 1) + behind
        rank = np.unique(pairs, return_inverse=True)[1].astype(np.int64) + 1
        step *= 2
    return np.argsort(rank, kind="stable")


class CorpusDrafter:
    """Proposes what followed in a corpus; keeps nothing of its own."""

    def __init__(self, corpus: Corpus, *, most: int = 16) -> None:
        self.corpus, self.most = corpus, most

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        return self.corpus.following(tokens, min(most, self.most))

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        return None


class PredictedText:
    """Proposes what a caller expects the text to be: from its beginning, and, where the text has
    gone another way, from where it reads the same again."""

    def __init__(self, corpus: Corpus, ids: Sequence[int], *, start: int, most: int = 16) -> None:
        self.corpus, self.ids, self.start, self.most = corpus, list(ids), start, most

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        most, written = min(most, self.most), len(tokens) - self.start
        if tokens[self.start :] == self.ids[:written]:
            return self.ids[written : written + most]
        return self.corpus.following(tokens[self.start :], most)

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        return None
