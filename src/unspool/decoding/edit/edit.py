"""Revising a text: find what is doubtful, propose something better, change it, and look again.

edit = lm.edit("The cat sat at the mat, and then it slept.")
edit.changes                  # each with its probability; those above the threshold are made
edit.undo(0)                  # any of them can be taken back, and made again
print(edit.text, edit.before.perplexity, edit.after.perplexity)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from unspool.decoding.edit.changes import Change, ChangedText
from unspool.decoding.edit.doubt import Doubt, document_score, doubts
from unspool.decoding.edit.proposals import Unit, proposals, units
from unspool.decoding.fill.drafts import Drafting
from unspool.decoding.fill.fill import drafting
from unspool.decoding.fill.masked import MaskedModel, masked_model
from unspool.decoding.progress import Tell, progress_bar
from unspool.decoding.written import whole
from unspool.engine.steps import Score, brief
from unspool.errors import SettingsError, check_number
from unspool.notebook import bar, escape, note, percent, picture, table
from unspool.session import Session

Kind = Literal["same", "removed", "added"]
_PIECES = re.compile(r"\s+|\w+|[^\w\s]")
_CERTAIN = 0.5  # nats of doubt below which nobody looks at a word
_CONTEXT = 200  # characters around a word that, when they change, make it worth another look


class Edit(ChangedText):
    """A text under revision: every proposed change, made or not, and what the text was worth."""

    def __init__(self, lm: Session, text: str) -> None:
        super().__init__(text)
        self._lm = lm
        self.before: Score = document_score(lm, text)  # the text as it was
        self.doubts: list[Doubt] = []  # of its tokens, before anything was changed
        self.passes = 0  # over the text
        self.weighed = 0  # tokens that were judged to rank proposals
        self._after: tuple[str, Score] = (text, self.before)

    @property
    def after(self) -> Score:
        """The text as it is now."""
        if self._after[0] != self.text:
            self._after = self.text, document_score(self._lm, self.text)
        return self._after[1]

    @property
    def applied(self) -> list[Change]:
        """The changes that are made."""
        return [change for change in self.changes if change.applied]

    def tracked(self) -> Iterator[tuple[Kind, str]]:
        """The text with its changes in place: what stayed, what was removed, what was added."""
        old, new = _PIECES.findall(self.original), _PIECES.findall(self.text)
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for tag, a, b, c, d in matcher.get_opcodes():
            if tag == "equal":
                yield "same", "".join(old[a:b])
                continue
            if b > a:
                yield "removed", "".join(old[a:b])
            if d > c:
                yield "added", "".join(new[c:d])

    def diff(self, name: str = "text") -> str:
        """The changes as a unified diff."""
        lines = difflib.unified_diff(
            self.original.splitlines(keepends=True),
            self.text.splitlines(keepends=True),
            name,
            f"{name} (edited)",
        )
        return "".join(one if one.endswith("\n") else f"{one}\n\\ No newline at end of file\n"
                       for one in lines)  # fmt: skip

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        made = f"{len(self.applied)} of {len(self.changes)} changes made"
        scores = f"perplexity {self.before.perplexity:.4g} → {self.after.perplexity:.4g}"
        return f"<Edit {brief(self.text)}, {made}, {scores}>"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "text": self.text,
            "original": self.original,
            "perplexity_before": self.before.perplexity,
            "perplexity_after": self.after.perplexity,
            "logprob_before": self.before.total,
            "logprob_after": self.after.total,
            "passes": self.passes,
            "weighed": self.weighed,
            "changes": [change.to_dict() for change in self.changes],
        }

    def _repr_html_(self) -> str:
        words = {"same": "{}", "removed": "<del>{}</del>", "added": "<ins>{}</ins>"}
        text = "".join(words[kind].format(escape(piece)) for kind, piece in self.tracked())
        rows = [
            (str(c.number), escape(c.old), escape(c.new),
             bar(c.probability, 1.0) + " " + percent(c.probability), "yes" if c.applied else "no")
            for c in self.changes
        ]  # fmt: skip
        told = note(
            f"perplexity {self.before.perplexity:.4g}, now {self.after.perplexity:.4g}, after "
            f"{self.passes} passes"
        )
        head = ("number", "instead of", "now", "probability", "made")
        return picture(f'<div class="text">{text}</div>', table(head, rows), told)


def edit(
    lm: Session,
    text: str,
    *,
    twin: Session | MaskedModel | None = None,
    doubt: str = "auto",
    threshold: float = 0.99,
    trust: float = 10.0,
    passes: int = 3,
    budget: int | None = None,
    places: int = 24,
    candidates: int = 12,
    reach: int | None = 24,
    progress: bool = True,
) -> Edit:
    """A text revised; see `LanguageModel.edit`."""
    if not isinstance(text, str) or not text.strip():
        raise SettingsError("there is nothing to edit; give a text with words in it")
    if lm.config.sight != "causal":
        raise SettingsError(
            "edits are ranked by a causal model; load one, and give this as its twin: "
            "lm.edit(text, twin=masked)"
        )
    check_number("threshold", threshold, 0, 1)
    check_number("trust", trust, 0)
    if reach is not None:
        whole("reach", reach)
    whole("passes", passes)
    whole("places", places)
    whole("candidates", candidates)
    if budget is not None:
        whole("budget", budget, least=0)
    made = Edit(lm, text)
    reviser = _Reviser(
        lm,
        made,
        replace(drafting(lm, {}, candidates=candidates, drafts=2), singles=2 * candidates),
        masked_model(twin) if twin is not None else None,
        doubt,
        reach,
        threshold,
        trust,
        budget,
    )
    with progress_bar("revising", passes * places, show=progress) as tell:
        going = True
        while going and made.passes < passes:
            going = reviser.run(places, tell)
    return made


class _Reviser:
    """Goes over a text until nothing changes."""

    def __init__(
        self,
        lm: Session,
        made: Edit,
        how: Drafting,
        twin: MaskedModel | None,
        by: str,
        reach: int | None,
        threshold: float,
        trust: float,
        budget: int | None,
    ) -> None:
        self._lm, self._made, self._how, self._twin = lm, made, how, twin
        self._by, self._reach, self._threshold, self._budget = by, reach, threshold, budget
        self._trust = trust
        self._seen: set[tuple[str, str, str]] = set()

    def run(self, places: int, tell: Tell) -> bool:
        """One pass, the most doubtful words first; whether another could change something."""
        made = self._made
        found, _ = doubts(self._lm, made.text, by=self._by, twin=self._twin)
        made.doubts = made.doubts or found
        shifts: list[tuple[int, int]] = []  # where changes were made in this pass, by how much
        looked, is_changed = 0, False
        for unit in units(made.text, found):
            if looked == places or unit.doubt < _CERTAIN or self._is_spent():
                break
            moved = unit.start + sum(by for at, by in shifts if at <= unit.start)
            if not self._is_new(unit, moved):
                continue
            looked += 1
            tell(made.passes * places + looked)
            change = self._change(unit, moved)
            if change is not None and change.probability >= self._threshold:
                made.apply(change.number)
                shifts.append((unit.start, len(change.new) - len(change.old)))
                is_changed = True
        made.passes += 1
        return is_changed and not self._is_spent()

    def _is_spent(self) -> bool:
        return self._budget is not None and self._made.weighed >= self._budget

    def _is_new(self, unit: Unit, start: int) -> bool:
        """Whether nobody has looked at this word with this around it."""
        text, end = self._made.text, start + len(unit.text)
        around = text[max(0, start - _CONTEXT) : start], unit.text, text[end : end + _CONTEXT]
        if around in self._seen:
            return False
        self._seen.add(around)
        return True

    def _change(self, unit: Unit, start: int) -> Change | None:
        """A proposal, if something else is likelier than what stands there."""
        made = self._made
        here = Unit(start, unit.text, unit.doubt, unit.tokens)
        found = proposals(
            self._lm, made.text, here, self._how,
            reach=self._reach, twin=self._twin, trust=self._trust,
        )  # fmt: skip
        made.weighed += sum(len(filled.steps) for filled in found)
        best = found[0]
        if best.texts[0] == unit.text:
            return None
        now = next(filled for filled in found if filled.texts[0] == unit.text)
        return made.propose(
            start,
            unit.text,
            best.texts[0],
            probability=best.probability,
            gain=best.score - now.score,
            doubt=unit.doubt,
            in_pass=made.passes,
            alternatives=tuple((filled.texts[0], filled.probability) for filled in found),
        )
