"""Filling by FIM tokens: a model that was trained to write the middle when it has read both sides.

Such a vocabulary holds tokens for "before the gap", "behind it" and "now the middle". Which they
are is found by their texts, not by the model's name. The middle ends where the model says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from unspool.decoding.fill.gaps import Gap, GappedText
from unspool.decoding.fill.result import Filled, in_order
from unspool.decoding.together import write_all
from unspool.engine.generation import Generation
from unspool.session import Session
from unspool.text.tokenizer.tokenizer import Tokenizer

# Before the gap, behind it, the middle: Qwen2.5-Coder and others, StarCoder, Granite, CodeLlama,
# DeepSeek-Coder, GLM, Codestral's names.
_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
_REPO = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<repo_name>")
_FILE = ("<|file_sep|>", "<file_sep>")
_ENDS = (*_REPO, *_FILE, "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>", "▁<EOT>", "<EOT>",
         "<|endoftext|>", "<｜end▁of▁sentence｜>", "</s>", "<|cursor|>")  # fmt: skip
_SNIPPET = "\n\n--- snippet ---\n\n"  # before a further file, where no token says so


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The tokens of one vocabulary."""

    prefix: int
    suffix: int
    middle: int
    repo: int | None  # stands before a repository's name
    file: int | None  # ... and before a file's
    ends: frozenset[int]  # what ends the middle


@lru_cache(maxsize=16)
def fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    """The tokens by which a vocabulary says what stands around a gap, if it has them."""

    def first(texts: Sequence[str]) -> int | None:
        return next((n for text in texts if (n := tokenizer.token_id(text)) is not None), None)

    for form in _FORMS:
        found = [tokenizer.token_id(text) for text in form]
        if None not in found:
            prefix, suffix, middle = (int(n or 0) for n in found)
            ends = {n for text in _ENDS if (n := tokenizer.token_id(text)) is not None}
            ends |= {prefix, suffix, middle, *tokenizer.end_ids}
            return FimTokens(prefix, suffix, middle, first(_REPO), first(_FILE), frozenset(ends))
    return None


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A further file that the model reads first."""

    name: str
    text: str


def fim_prompt(
    tokenizer: Tokenizer,
    tokens: FimTokens,
    left: str,
    right: str,
    others: Sequence[OtherFile] | None = None,
) -> list[int]:
    """What a model reads before it writes the middle: the left side, then the right. With `others`,
    also without any, this is a file of a repository, and those come first."""
    ids = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    if others is not None and tokens.repo is not None:
        ids += [tokens.repo, *tokenizer.encode("myproject\n")]
    for other in others or ():
        if tokens.file is not None:
            ids += [tokens.file, *tokenizer.encode(other.name + "\n")]
        else:
            ids += tokenizer.encode(_SNIPPET)
        ids += tokenizer.encode(other.text)
    if others is not None and tokens.file is not None:
        ids += [tokens.file, *tokenizer.encode("filename\n")]
    ids += [tokens.prefix, *tokenizer.encode(left), tokens.suffix, *tokenizer.encode(right)]
    return [*ids, tokens.middle]


def fim_draft(lm: Session, tokens: FimTokens, prompt: list[int], options: Any) -> Generation:
    """The middle, to be written: it ends where the model goes on to something else."""
    draft = lm.draft(prompt, **options)
    limits = replace(draft.request.limits, end_ids=draft.request.limits.end_ids | tokens.ends)
    return replace(draft, request=replace(draft.request, limits=limits))


def fill_by_fim(
    lm: Session,
    tokens: FimTokens,
    gapped: GappedText,
    options: dict[str, Any],
    *,
    drafts: int,
) -> tuple[Filled, ...]:
    """Fillings of a text, best first; gaps are filled one after the other, each with the text up
    to the next. A score is the log-probability of the middle and its end."""
    kept = [Filled((), gapped.texts[0], 0.0)]
    for gap, right in zip(gapped.gaps, gapped.texts[1:], strict=True):
        best = kept[0]
        prompt = fim_prompt(lm.tokenizer, tokens, best.text, right)
        texts = list(_drafts(lm, tokens, prompt, gap, options, drafts))
        write_all(lm, texts, patient=False)
        once = {text.text: text for text in reversed(texts)}  # the first of equal ones stays
        fitting = [text for text in once.values() if len(_inside(text, tokens)) >= gap.least]
        kept = list(
            in_order([_filled(best, text, right, tokens) for text in fitting or once.values()])
        )
    return tuple(kept)


def _drafts(
    lm: Session,
    tokens: FimTokens,
    prompt: list[int],
    gap: Gap,
    options: dict[str, Any],
    count: int,
) -> Iterator[Generation]:
    """The likeliest token each time, and samples beside it."""
    given = {"temperature": 0, **options, "max_tokens": gap.most}
    yield fim_draft(lm, tokens, prompt, given)
    sampled = {"seed": 0, **given, "temperature": given["temperature"] or 0.8}
    for number in range(1, count):
        yield fim_draft(lm, tokens, prompt, {**sampled, "sample": number})


def _inside(text: Generation, tokens: FimTokens) -> list[int]:
    return [token for token in text.tokens if token not in tokens.ends]


def _filled(before: Filled, text: Generation, right: str, tokens: FimTokens) -> Filled:
    inside = tuple(step for step in text.steps if step.token not in tokens.ends)
    return Filled(
        (*before.texts, text.text),
        before.text + text.text + right,
        before.score + text.logprob,
        (*before.steps, *text.steps),
        (*before.gap_steps, inside),
        is_cut=before.is_cut or text.finish_reason == "length",
    )
