"""Infilling: `lm.fill("The ", gap, " sat on the mat")`.

Three methods; the model decides which: a masked model sees both sides; a vocabulary
with FIM tokens belongs to a model trained to write the middle; any other causal model
drafts after the prefix and ranks the drafts with the suffix (`causal.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from unspool.decoding.batch import run_all
from unspool.decoding.branches import check_int
from unspool.decoding.infill.causal import Drafting, fill_by_ranking
from unspool.decoding.infill.masked import MaskedModel, WholeText, fill_by_masks, masked_model
from unspool.decoding.infill.result import Filled, Filling, Gap, GappedText, gap, rank_candidates
from unspool.engine.generation import Generation
from unspool.errors import SettingsError
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
    lm: Session, tokens: FimTokens, gapped: GappedText, options: dict[str, Any], *, drafts: int
) -> tuple[Filled, ...]:
    """Fill a text, best first. Gaps are filled in order, each with the text up to the next gap as
    suffix. The score is the log-probability of the middle and its end."""
    fillings = [Filled((), gapped.texts[0], 0.0)]
    for next_gap, suffix in zip(gapped.gaps, gapped.texts[1:], strict=True):
        best = fillings[0]
        prompt = fim_prompt(lm.tokenizer, tokens, best.text, suffix)
        texts = list(_drafts(lm, tokens, prompt, next_gap, options, drafts))
        run_all(lm, texts, patient=False)
        unique = {text.text: text for text in reversed(texts)}  # keep the first of duplicates
        fitting = [
            text for text in unique.values() if len(_middle_tokens(text, tokens)) >= next_gap.least
        ]
        fillings = list(
            rank_candidates(
                [_filled(best, text, suffix, tokens) for text in fitting or unique.values()]
            )
        )
    return tuple(fillings)


def _drafts(
    lm: Session, tokens: FimTokens, prompt: list[int], gap: Gap, options: dict[str, Any], count: int
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


WAYS = ("auto", "masked", "fim", "ranking")
REACH = 64  # tokens of the suffix that are scored
_UNSUPPORTED = ("json", "json_schema", "regex", "choice", "grammar", "guard", "speculate")


def fill(
    lm: Session,
    parts: Sequence[str | Gap],
    *,
    by: str = "auto",
    candidates: int = 20,
    drafts: int = 6,
    reach: int | None = REACH,
    choices: Sequence[str] | None = None,
    twin: Session | MaskedModel | None = None,
    usual: Gap = gap,
    **options: Any,
) -> Filling:
    """Fill the gaps of a text; see `LanguageModel.fill`."""
    if by not in WAYS:
        raise SettingsError(f"by must be one of {', '.join(WAYS)}, got {by!r}")
    check_int("candidates", candidates)
    check_int("drafts", drafts)
    if reach is not None:
        check_int("reach", reach)
    if options.get("max_tokens") is not None:
        raise SettingsError("set the length in the gap, gap(1, 8), not with max_tokens")
    gapped = GappedText.parse(parts, usual)
    method = _choose_method(lm, by, choices, twin)
    top = options.get("top") or 0
    candidates_found: tuple[Filled, ...]
    if method == "masked":
        candidates_found = fill_by_masks(WholeText(lm), gapped, candidates=candidates, top=top)
    elif method == "fim":
        tokens = fim_tokens(lm.tokenizer)
        if tokens is None:
            raise SettingsError(
                "this model's vocabulary has no FIM tokens; leave out by='fim' to draft and rank "
                "candidates"
            )
        candidates_found = fill_by_fim(lm, tokens, gapped, options, drafts=drafts)
    else:
        proposed: list[tuple[str, ...]] = []
        if choices is not None:
            proposed = _check_choices(choices, gapped)
        elif twin is not None:
            fillings = fill_by_masks(masked_model(twin), gapped, candidates=candidates)
            proposed = [filled.texts for filled in fillings]
        candidates_found = fill_by_ranking(
            lm,
            gapped,
            draft_settings(lm, options, candidates=candidates, drafts=drafts),
            reach=reach,
            top=top,
            proposed=proposed,
            only=choices is not None,
        )
    return Filling(candidates_found[:candidates], method, gapped.texts)


def draft_settings(
    lm: Session, options: dict[str, Any], *, candidates: int, drafts: int
) -> Drafting:
    """Draft settings from the caller's options; greedy by default."""
    for name in _UNSUPPORTED:
        if options.get(name):
            raise SettingsError(
                f"{name} cannot be used when a gap is filled by ranking: candidates are drafts cut "
                "at any token; leave it out"
            )
    request = lm.prepare_generation([0], **{"temperature": 0, **options}).request
    stop = request.limits.stop
    return Drafting(request.settings, max(64, candidates), drafts, candidates, stop)


def _choose_method(lm: Session, by: str, choices: object, twin: object) -> str:
    if by != "auto":
        return by
    if lm.config.sight != "causal":
        return "masked"
    if choices is None and twin is None and fim_tokens(lm.tokenizer) is not None:
        return "fim"
    return "ranking"


def _check_choices(choices: Sequence[str], gapped: GappedText) -> list[tuple[str, ...]]:
    """The caller's candidates for the only gap."""
    if len(gapped.gaps) > 1:
        raise SettingsError(f"choices need a text with one gap, this one has {len(gapped.gaps)}")
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not choices or not all(isinstance(choice, str) for choice in choices):
        raise SettingsError(f"choices must be a list of at least one text, got {choices!r}")
    return [(choice,) for choice in dict.fromkeys(choices)]
