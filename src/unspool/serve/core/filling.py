"""Infill: texts between a prefix and a suffix.

A model with FIM tokens generates the middle step by step. For other models candidates are ranked
first, and choice i is candidate i, whose steps then arrive together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from unspool.decoding.fill.borders import start_ids
from unspool.decoding.fill.fill import fill
from unspool.decoding.fill.fim import FimTokens, OtherFile, fim_prompt, fim_tokens, make_fim_request
from unspool.decoding.fill.gaps import LONGEST, Gap
from unspool.decoding.fill.result import Filling
from unspool.engine.generation import Generation
from unspool.engine.stream import StepQueue, StepStream
from unspool.serve.core.texts import RequestTexts
from unspool.session import Session

_CANDIDATES = 20
_DEFAULT_GAP = 32  # tokens of a ranked gap without a limit


@dataclass(frozen=True, slots=True)
class InfillGap:
    """A gap between two texts. `others`: further files that the model reads first."""

    prefix: str
    suffix: str
    others: tuple[OtherFile, ...] | None = None

    def prompt(self, lm: Session) -> list[int]:
        """The tokens of the prompt."""
        tokens = _fim(lm)
        if tokens is not None:
            return fim_prompt(lm.tokenizer, tokens, self.prefix, self.suffix, self.others)
        return lm.prompt_ids(self.before or start_ids(lm))

    @property
    def before(self) -> str:
        """Everything before the gap as one text, for a model without FIM tokens."""
        return "".join(f"{other.text}\n\n" for other in self.others or ()) + self.prefix


def _fim(lm: Session) -> FimTokens | None:
    return fim_tokens(lm.tokenizer) if lm.config.sight == "causal" else None


@dataclass(eq=False)
class InfillTexts(RequestTexts):
    """The texts of an infill request; each prompt has one gap."""

    gaps: list[InfillGap] = field(default_factory=list)
    _ranked: dict[int, Filling] = field(default_factory=dict)
    _ranking: Lock = field(default_factory=Lock)

    def _open_stream(self, number: int) -> tuple[Generation, StepStream]:
        lm, (prompt, sample) = self.served.lm, divmod(number, self.n)
        tokens = _fim(lm)
        if tokens is None:
            return self._ranked_candidate(prompt, sample)
        options = {**self.options, "sample": self.options.get("sample", 0) + sample}
        generation = make_fim_request(lm, tokens, self.prompts[prompt], options)
        return generation, lm.engine.submit(generation.request)

    def _ranked_candidate(self, prompt: int, sample: int) -> tuple[Generation, StepStream]:
        """A ranked candidate as a stream of steps."""
        with self._ranking:
            if prompt not in self._ranked:
                self._ranked[prompt] = self._rank(prompt)
        candidates = self._ranked[prompt].candidates
        steps = list(candidates[min(sample, len(candidates) - 1)].gap_steps[0])
        queue = StepQueue()
        for number, step in enumerate(steps, 1):
            queue.add(replace(step, finish_reason="stop") if number == len(steps) else step)
        queue.end()
        lm = self.served.lm
        request = lm.request(self.prompts[prompt], dict(self.options))
        return Generation(request, empty_reason="stop", source=lm), StepStream(queue)

    def _rank(self, prompt: int) -> Filling:
        lm, infill, options = self.served.lm, self.gaps[prompt], dict[str, Any](self.options)
        max_tokens = options.pop("max_tokens")
        room = max(1, lm.context - len(self.prompts[prompt]))
        gap_len = min(max_tokens, LONGEST) if max_tokens < room else _DEFAULT_GAP
        gap = Gap(1, max(1, min(gap_len, room)))
        parts: list[str | Gap] = [infill.before, gap, infill.suffix]
        return fill(lm, parts, candidates=max(_CANDIDATES, self.n), **options)
