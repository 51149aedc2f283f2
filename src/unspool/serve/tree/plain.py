"""A branch as plain text for infill and revision, and the steps of each part of it."""

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
    """The generated text, and the text before it. Without the chat template: infill works on plain
    text without control tokens."""

    before: str
    steps: Sequence[Step]

    @classmethod
    def from_branch(cls, branch: TreeBranch) -> PlainText:
        return cls(_prompt_text(branch.prompt), list(branch.steps))

    @cached_property
    def written(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def text(self) -> str:
        return self.before + self.written

    @cached_property
    def ends(self) -> list[int]:
        """Where each step ends, in characters of the generated text."""
        return list(accumulate(len(step.text) for step in self.steps))

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The characters of the steps from `first` to before `last`."""
        return (self.ends[first - 1] if first else 0), (self.ends[last - 1] if last else 0)

    def steps_of(self, start: int, end: int) -> tuple[int, int]:
        """The steps that these characters of the generated text belong to."""
        first = bisect_right(self.ends, start)
        while 0 < first < len(self.steps) and self.steps[first].partial_utf8:
            first -= 1  # keep a character of several tokens together
        last = first
        while last < len(self.steps) and (self.ends[last - 1] if last else 0) < end:
            last += 1
        return first, last

    def replacement(self, start: int, end: int, words: str) -> tuple[int, int, str]:
        """Replace these characters: the steps to replace, and their new text."""
        first, last = self.steps_of(start, end)
        begin, stop = self.span(first, last)
        return first, last, self.written[begin:start] + words + self.written[end:stop]


def _prompt_text(prompt: TreePrompt) -> str:
    if prompt.messages is None:
        return prompt.text
    contents = [str(message.get("content") or "") for message in prompt.messages]
    return "".join(f"{text}\n\n" for text in contents if text)


def checked_range(branch: TreeBranch, first: int, last: int) -> tuple[int, int]:
    """A non-empty range of steps. Raises 400."""
    first, last = branch.step_index(first, "first"), branch.step_index(last, "last")
    if first >= last:
        raise bad_request(f"last must be after first, got {first} and {last}", "last")
    return first, last
