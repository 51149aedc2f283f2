"""Infilling with FIM (fill-in-the-middle) tokens, for models trained with them.

The prefix, suffix and middle tokens are found by their texts in the vocabulary, not by the model's
name. The middle ends at an end token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from unspool.decoding.fill.gaps import Gap, GappedText
from unspool.decoding.fill.result import Filled, rank_candidates
from unspool.decoding.together import run_all
from unspool.engine.generation import Generation
from unspool.session import Session
from unspool.text.tokenizer.tokenizer import Tokenizer

# Prefix, suffix, middle: Qwen2.5-Coder and others, StarCoder, Granite, CodeLlama,
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
_SNIPPET = "\n\n--- snippet ---\n\n"  # separates files if the vocabulary has no token for it


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The FIM tokens of one vocabulary."""

    prefix: int
    suffix: int
    middle: int
    repo: int | None  # before a repository's name
    file: int | None  # before a file's name
    ends: frozenset[int]  # end the middle


@lru_cache(maxsize=16)
def fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    """Find the FIM tokens of a vocabulary; None if it has none."""

    def first(texts: Sequence[str]) -> int | None:
        return next((n for text in texts if (n := tokenizer.token_id(text)) is not None), None)

    for form in _FORMS:
        ids = [tokenizer.token_id(text) for text in form]
        if None not in ids:
            prefix, suffix, middle = (int(n or 0) for n in ids)
            ends = {n for text in _ENDS if (n := tokenizer.token_id(text)) is not None}
            ends |= {prefix, suffix, middle, *tokenizer.end_ids}
            return FimTokens(prefix, suffix, middle, first(_REPO), first(_FILE), frozenset(ends))
    return None


@dataclass(frozen=True, slots=True)
class OtherFile:
    """Another file given as context."""

    name: str
    text: str


def fim_prompt(
    tokenizer: Tokenizer,
    tokens: FimTokens,
    prefix: str,
    suffix: str,
    others: Sequence[OtherFile] | None = None,
) -> list[int]:
    """Build the FIM prompt: prefix, suffix, middle token. If `others` is not None, the repository
    format is used, with these files first."""
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
    ids += [tokens.prefix, *tokenizer.encode(prefix), tokens.suffix, *tokenizer.encode(suffix)]
    return [*ids, tokens.middle]


def make_fim_request(lm: Session, tokens: FimTokens, prompt: list[int], options: Any) -> Generation:
    """Prepare the request for the middle; FIM and file tokens end it."""
    draft = lm.prepare_generation(prompt, **options)
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
    """Fill a text, best first. Gaps are filled in order, each with the text up to the next gap as
    suffix. The score is the log-probability of the middle and its end."""
    fillings = [Filled((), gapped.texts[0], 0.0)]
    for gap, suffix in zip(gapped.gaps, gapped.texts[1:], strict=True):
        best = fillings[0]
        prompt = fim_prompt(lm.tokenizer, tokens, best.text, suffix)
        texts = list(_drafts(lm, tokens, prompt, gap, options, drafts))
        run_all(lm, texts, patient=False)
        unique = {text.text: text for text in reversed(texts)}  # keep the first of duplicates
        fitting = [
            text for text in unique.values() if len(_middle_tokens(text, tokens)) >= gap.least
        ]
        fillings = list(
            rank_candidates(
                [_filled(best, text, suffix, tokens) for text in fitting or unique.values()]
            )
        )
    return tuple(fillings)


def _drafts(
    lm: Session,
    tokens: FimTokens,
    prompt: list[int],
    gap: Gap,
    options: dict[str, Any],
    count: int,
) -> Iterator[Generation]:
    """One greedy draft, and samples."""
    greedy_options = {"temperature": 0, **options, "max_tokens": gap.most}
    yield make_fim_request(lm, tokens, prompt, greedy_options)
    sampled = {"seed": 0, **greedy_options, "temperature": greedy_options["temperature"] or 0.8}
    for number in range(1, count):
        yield make_fim_request(lm, tokens, prompt, {**sampled, "sample": number})


def _middle_tokens(text: Generation, tokens: FimTokens) -> list[int]:
    return [token for token in text.tokens if token not in tokens.ends]


def _filled(before: Filled, text: Generation, suffix: str, tokens: FimTokens) -> Filled:
    inside = tuple(step for step in text.steps if step.token not in tokens.ends)
    return Filled(
        (*before.texts, text.text),
        before.text + text.text + suffix,
        before.score + text.logprob,
        (*before.steps, *text.steps),
        (*before.gap_steps, inside),
        is_cut=before.is_cut or text.finish_reason == "length",
    )
