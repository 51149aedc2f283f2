"""A branch as the plain text that filling and revising work on, and which steps its words are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from unspool.engine.steps import Step
from unspool.serve.http.errors import bad_request
from unspool.serve.tree.branches import TreeBranch, TreePrompt


@dataclass(frozen=True)
class PlainText:
    """What was written, and the words before it. A chat's template is left out: gaps are filled in
    texts, which know no control tokens."""

    before: str
    steps: Sequence[Step]

    @classmethod
    def of(cls, branch: TreeBranch) -> PlainText:
        return cls(_words(branch.prompt), list(branch.steps))

    @cached_property
    def written(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def text(self) -> str:
        return self.before + self.written

    @cached_property
    def ends(self) -> list[int]:
        """Where each step ends, in characters of what was written."""
        return list(accumulate(len(step.text) for step in self.steps))

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The characters of the steps from `first` to before `last`."""
        return (self.ends[first - 1] if first else 0), (self.ends[last - 1] if last else 0)

    def steps_of(self, start: int, end: int) -> tuple[int, int]:
        """The steps that have a part in these characters of what was written."""
        first = bisect_right(self.ends, start)
        while 0 < first < len(self.steps) and self.steps[first].begun:
            first -= 1  # a character of several tokens goes as a whole
        last = first
        while last < len(self.steps) and (self.ends[last - 1] if last else 0) < end:
            last += 1
        return first, last

    def instead(self, start: int, end: int, words: str) -> tuple[int, int, str]:
        """Other words for these characters: which steps they replace, and by what text."""
        first, last = self.steps_of(start, end)
        begin, stop = self.span(first, last)
        return first, last, self.written[begin:start] + words + self.written[end:stop]


def _words(prompt: TreePrompt) -> str:
    if prompt.messages is None:
        return prompt.text
    said = [str(message.get("content") or "") for message in prompt.messages]
    return "".join(f"{words}\n\n" for words in said if words)


def checked_range(branch: TreeBranch, first: int, last: int) -> tuple[int, int]:
    """A part of the steps, at least one."""
    first, last = branch.place(first, "first"), branch.place(last, "last")
    if first >= last:
        raise bad_request(f"first is {first} and last is {last}: that is no part of the text",
                          "last")  # fmt: skip
    return first, last
