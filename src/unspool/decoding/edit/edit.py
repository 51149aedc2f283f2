"""Revise a text: find doubtful words, propose better ones, apply them, repeat.

edit = lm.edit("The cat sat at the mat, and then it slept.")
edit.changes                  # each with its probability; those above the threshold are applied
edit.undo(0)                  # any change can be undone and applied again
print(edit.text, edit.before.perplexity, edit.after.perplexity)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from unspool.decoding.edit.changes import Change, ChangedText
from unspool.decoding.edit.doubt import Doubt, document_score, score_doubts
from unspool.decoding.edit.proposals import EditUnit, propose_replacements, split_units
from unspool.decoding.fill.drafts import Drafting
from unspool.decoding.fill.fill import draft_settings
from unspool.decoding.fill.masked import MaskedModel, masked_model
from unspool.decoding.progress import ProgressCallback, progress_bar
from unspool.decoding.written import check_int
from unspool.engine.steps import Score, brief
from unspool.errors import SettingsError, check_number
from unspool.notebook import bar_html, escape_html, note_html, notebook_html, percent, table_html
from unspool.session import Session

DiffKind = Literal["same", "removed", "added"]
_PIECES = re.compile(r"\s+|\w+|[^\w\s]")
_MIN_SURPRISE = 0.5  # nats below which a word is skipped
_CONTEXT_CHARS = 200  # around a word; if they change, the word is tried again


class Edit(ChangedText):
    """A text under revision: all proposed changes, and scores before and after."""

    def __init__(self, lm: Session, text: str) -> None:
        super().__init__(text)
        self._lm = lm
        self.before: Score = document_score(lm, text)  # of the original text
        self.doubts: list[Doubt] = []  # of the original text's tokens
        self.passes = 0  # over the text
        self.weighed = 0  # tokens scored to rank proposals
        self._after: tuple[str, Score] = (text, self.before)

    @property
    def after(self) -> Score:
        """The text as it is now."""
        if self._after[0] != self.text:
            self._after = self.text, document_score(self._lm, self.text)
        return self._after[1]

    @property
    def applied(self) -> list[Change]:
        """The applied changes."""
        return [change for change in self.changes if change.applied]

    def tracked(self) -> Iterator[tuple[DiffKind, str]]:
        """Word-level diff of original and text: (kind, words) pairs."""
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
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
                       for line in lines)  # fmt: skip

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        applied = f"{len(self.applied)} of {len(self.changes)} changes made"
        scores = f"perplexity {self.before.perplexity:.4g} → {self.after.perplexity:.4g}"
        return f"<Edit {brief(self.text)}, {applied}, {scores}>"

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
        text = "".join(words[kind].format(escape_html(piece)) for kind, piece in self.tracked())
        rows = [
            (str(c.number), escape_html(c.old), escape_html(c.new),
             bar_html(c.probability, 1.0) + " " + percent(c.probability),
             "yes" if c.applied else "no")
            for c in self.changes
        ]  # fmt: skip
        summary = note_html(
            f"perplexity {self.before.perplexity:.4g}, now {self.after.perplexity:.4g}, after "
            f"{self.passes} passes"
        )
        head = ("number", "instead of", "now", "probability", "made")
        return notebook_html(f'<div class="text">{text}</div>', table_html(head, rows), summary)


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
    """Revise a text; see `LanguageModel.edit`."""
    if not isinstance(text, str) or not text.strip():
        raise SettingsError("text must contain words; there is nothing to edit")
    if lm.config.sight != "causal":
        raise SettingsError(
            "edits are ranked by a causal model; load one, and give this one as its twin: "
            "lm.edit(text, twin=masked)"
        )
    check_number("threshold", threshold, 0, 1)
    check_number("trust", trust, 0)
    if reach is not None:
        check_int("reach", reach)
    check_int("passes", passes)
    check_int("places", places)
    check_int("candidates", candidates)
    if budget is not None:
        check_int("budget", budget, least=0)
    result = Edit(lm, text)
    reviser = _Reviser(
        lm,
        result,
        replace(draft_settings(lm, {}, candidates=candidates, drafts=2), singles=2 * candidates),
        masked_model(twin) if twin is not None else None,
        doubt,
        reach,
        threshold,
        trust,
        budget,
    )
    with progress_bar("revising", passes * places, show=progress) as report:
        changed = True
        while changed and result.passes < passes:
            changed = reviser.run(places, report)
    return result


class _Reviser:
    """Revises a text in passes."""

    def __init__(
        self,
        lm: Session,
        edit: Edit,
        how: Drafting,
        twin: MaskedModel | None,
        by: str,
        reach: int | None,
        threshold: float,
        trust: float,
        budget: int | None,
    ) -> None:
        self._lm, self._edit, self._settings, self._twin = lm, edit, how, twin
        self._doubt_by, self._reach, self._threshold, self._budget = by, reach, threshold, budget
        self._trust = trust
        self._tried: set[tuple[str, str, str]] = set()

    def run(self, places: int, tell: ProgressCallback) -> bool:
        """Run one pass, most doubtful words first; True if another pass may change something."""
        edit = self._edit
        token_doubts, _ = score_doubts(self._lm, edit.text, by=self._doubt_by, twin=self._twin)
        edit.doubts = edit.doubts or token_doubts
        shifts: list[tuple[int, int]] = []  # (offset, length change) of the changes in this pass
        num_tried, is_changed = 0, False
        for unit in split_units(edit.text, token_doubts):
            if num_tried == places or unit.doubt < _MIN_SURPRISE or self._is_spent():
                break
            moved = unit.start + sum(by for at, by in shifts if at <= unit.start)
            if not self._is_new(unit, moved):
                continue
            num_tried += 1
            tell(edit.passes * places + num_tried)
            change = self._change(unit, moved)
            if change is not None and change.probability >= self._threshold:
                edit.apply(change.number)
                shifts.append((unit.start, len(change.new) - len(change.old)))
                is_changed = True
        edit.passes += 1
        return is_changed and not self._is_spent()

    def _is_spent(self) -> bool:
        return self._budget is not None and self._edit.weighed >= self._budget

    def _is_new(self, unit: EditUnit, start: int) -> bool:
        """Whether this word has not been tried in this context."""
        text, end = self._edit.text, start + len(unit.text)
        around = (
            text[max(0, start - _CONTEXT_CHARS) : start],
            unit.text,
            text[end : end + _CONTEXT_CHARS],
        )
        if around in self._tried:
            return False
        self._tried.add(around)
        return True

    def _change(self, unit: EditUnit, start: int) -> Change | None:
        """Propose a change if something else is likelier than the current word."""
        edit = self._edit
        here = EditUnit(start, unit.text, unit.doubt, unit.tokens)
        candidates = propose_replacements(
            self._lm, edit.text, here, self._settings,
            reach=self._reach, twin=self._twin, trust=self._trust,
        )  # fmt: skip
        edit.weighed += sum(len(filled.steps) for filled in candidates)
        best = candidates[0]
        if best.texts[0] == unit.text:
            return None
        now = next(filled for filled in candidates if filled.texts[0] == unit.text)
        return edit.propose(
            start,
            unit.text,
            best.texts[0],
            probability=best.probability,
            gain=best.score - now.score,
            doubt=unit.doubt,
            in_pass=edit.passes,
            alternatives=tuple((filled.texts[0], filled.probability) for filled in candidates),
        )
