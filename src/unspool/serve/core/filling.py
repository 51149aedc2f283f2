"""Texts that stand in a gap, started and handed on as other texts are.

A model with FIM tokens writes the middle step by step. With any other, candidates are ranked first,
and the steps of the best ones come all at once: choice number i is candidate number i.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from unspool.decoding.fill.borders import start_ids
from unspool.decoding.fill.fill import fill
from unspool.decoding.fill.fim import FimTokens, OtherFile, fim_draft, fim_prompt, fim_tokens
from unspool.decoding.fill.gaps import LONGEST, Gap
from unspool.decoding.fill.result import Filling
from unspool.engine.generation import Generation
from unspool.engine.stream import StepQueue, StepStream
from unspool.serve.core.texts import Texts
from unspool.session import Session

_CANDIDATES = 20
_USUAL = 32  # tokens of a ranked gap, where nobody says how many


@dataclass(frozen=True, slots=True)
class Between:
    """A gap between two texts; `others` are files that are read first, if this is one of many."""

    left: str
    right: str
    others: tuple[OtherFile, ...] | None = None

    def prompt(self, lm: Session) -> list[int]:
        """The tokens that the model reads before it writes."""
        tokens = _fim(lm)
        if tokens is not None:
            return fim_prompt(lm.tokenizer, tokens, self.left, self.right, self.others)
        return lm.prompt_ids(self.before or start_ids(lm))

    @property
    def before(self) -> str:
        """All that stands before the gap, for a model that reads it as one text."""
        return "".join(f"{other.text}\n\n" for other in self.others or ()) + self.left


def _fim(lm: Session) -> FimTokens | None:
    return fim_tokens(lm.tokenizer) if lm.config.sight == "causal" else None


@dataclass(eq=False)
class GapTexts(Texts):
    """What one request wants to stand in gaps; each prompt has one."""

    gaps: list[Between] = field(default_factory=list)
    _ranked: dict[int, Filling] = field(default_factory=dict)
    _ranking: Lock = field(default_factory=Lock)

    def _open_stream(self, number: int) -> tuple[Generation, StepStream]:
        lm, (prompt, sample) = self.served.lm, divmod(number, self.n)
        tokens = _fim(lm)
        if tokens is None:
            return self._chosen(prompt, sample)
        options = {**self.options, "sample": self.options.get("sample", 0) + sample}
        generation = fim_draft(lm, tokens, self.prompts[prompt], options)
        return generation, lm.engine.submit(generation.request)

    def _chosen(self, prompt: int, sample: int) -> tuple[Generation, StepStream]:
        """A candidate as if it had just been written."""
        with self._ranking:
            if prompt not in self._ranked:
                self._ranked[prompt] = self._rank(prompt)
        found = self._ranked[prompt].candidates
        steps = list(found[min(sample, len(found) - 1)].gap_steps[0])
        queue = StepQueue()
        for number, step in enumerate(steps, 1):
            queue.put(replace(step, finish_reason="stop") if number == len(steps) else step)
        queue.end()
        lm = self.served.lm
        request = lm.request(self.prompts[prompt], dict(self.options))
        return Generation(request, empty_reason="stop", source=lm), StepStream(queue)

    def _rank(self, prompt: int) -> Filling:
        lm, between, options = self.served.lm, self.gaps[prompt], dict[str, Any](self.options)
        wanted = options.pop("max_tokens")
        room = max(1, lm.context - len(self.prompts[prompt]))
        most = min(wanted, LONGEST) if wanted < room else _USUAL
        gap = Gap(1, max(1, min(most, room)))
        parts: list[str | Gap] = [between.before, gap, between.right]
        return fill(lm, parts, candidates=max(_CANDIDATES, self.n), **options)
