"""A request to the engine, and the interface of drafters for speculative decoding."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Annotated, Any, Protocol, TypedDict, TypeVar, get_type_hints, runtime_checkable

from unspool.backends.interventions import BranchInterventions, Intervention, resolve
from unspool.backends.step import Floats
from unspool.engine.reasoning import ReasoningSpec
from unspool.engine.results import Step
from unspool.errors import ContextError, SettingsError, count
from unspool.sampling import Grammar, GrammarSpec, SamplingSettings
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.settings import CustomStage, StageFunction
from unspool.text.tokenizer.stream import TextStream

# -- Context truncation: texts that grow longer than the model's context (the option `endless`)

SINKS = 4  # first tokens that attract the attention nothing else needs (attention sinks)


def num_truncated(length: int, context: int, num_kept: int) -> int:
    """Return how many tokens after the first `num_kept` are dropped from a text of `length`."""
    if length <= context:
        return 0
    block = max(1, (context - num_kept) // 2)
    return -(-(length - context) // block) * block


def visible_tokens(tokens: Sequence[int], context: int, num_kept: int) -> list[int]:
    """Return the tokens that the model sees when it writes the next one."""
    first_recent = num_kept + num_truncated(len(tokens), context, num_kept)
    return [*tokens[:num_kept], *tokens[first_recent:]]


def truncation_note(length: int, context: int, num_kept: int) -> str:
    """Describe which tokens the model saw at the end of a text of `length` tokens."""
    num_dropped = num_truncated(length, context, num_kept)
    return (
        f"the text outgrew the context of {context:,} tokens: at its end the model saw the first "
        f"{num_kept:,} and the last {length - num_kept - num_dropped:,} tokens, and none of the "
        f"{num_dropped:,} between"
    )


def parse_endless(value: Any, prompt_length: int, context: int) -> int | None:
    """Return how many first tokens stay visible; None if the text ends with the context."""
    if value is None or value is False:
        return None
    if value is True:  # a short prompt is the task: it stays
        return prompt_length if prompt_length <= context // 4 else min(SINKS, context // 2)
    if not isinstance(value, int) or value < 1:
        raise SettingsError(
            f"endless must be True, or the number of first tokens to keep visible, got {value!r}"
        )
    if value > context // 2:
        raise SettingsError(
            f"endless keeps {value:,} tokens visible, more than half of the context of "
            f"{context:,}; keep fewer"
        )
    return value


# -- When a text ends, and which part of it can be shown already


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop, and what to record."""

    max_tokens: int = 256
    context: int
    end_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    # Strings after which a text pauses, and which stay in it; only new text is searched. A search
    # sets them for one part of a text: traces do not save them.
    pauses: tuple[str, ...] = field(default=(), compare=False)
    sample: int = 0  # index among several samples with one seed
    top: int = 0  # candidates to record at each step
    explain: bool = False  # record what each sampling stage did
    # Continue beyond the context with this many first tokens kept visible; None: end there.
    endless: int | None = None

    def room(self, prompt_length: int) -> int:
        """Return how many tokens may follow a prompt."""
        if self.endless is not None:
            return self.max_tokens
        return max(0, min(self.max_tokens, self.context - prompt_length))

    def num_truncated(self, length: int) -> int:
        """Return how many of a text's `length` tokens the model no longer sees."""
        return 0 if self.endless is None else num_truncated(length, self.context, self.endless)

    def visible_tokens(self, tokens: list[int]) -> list[int]:
        """Return the tokens that the model sees when it writes the next one."""
        if self.endless is None:
            return tokens
        return visible_tokens(tokens, self.context, self.endless)


def check_fits(length: int, context: int, max_context: int = 0) -> None:
    """Raise ContextError for a prompt longer than the context.

    `max_context` is the longest context that the model can be loaded with.
    """
    if length > context:
        advice = f", or load the model with context={max_context}" if max_context > context else ""
        raise ContextError(
            f"the prompt has {length:,} tokens and the model's context holds {context:,}; "
            f"shorten the prompt{advice}",
            num_tokens=length,
            context=context,
        )


class StopChecker:
    """Incremental detokenizer and stop conditions of one text."""

    __slots__ = ("_limits", "_pause_window", "_prompt_length", "text")

    def __init__(self, limits: Limits, prompt_length: int, text: TextStream | None = None) -> None:
        self._limits, self._prompt_length = limits, prompt_length
        self.text = TextStream(limits.stop) if text is None else text
        self._pause_window = b""  # the last bytes, in which a pause string may have started

    def copy(self) -> StopChecker:
        other = StopChecker(self._limits, self._prompt_length, self.text.copy())
        other._pause_window = self._pause_window
        return other

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self.text.matched_stop

    def push(
        self, token: int, piece: bytes, length: int, must_end: bool = False
    ) -> tuple[str, str | None]:
        """Take the next token; return the text that can be shown now, and the finish reason if any.

        Args:
            token: The token's id. An end token itself is never shown.
            piece: The token's bytes.
            length: Tokens of prompt and text, this one included.
            must_end: A grammar allows nothing more.
        """
        limits = self._limits
        if token in limits.end_ids:
            return self.text.push(b""), "stop"
        text = self.text.push(piece)
        if self.text.matched_stop is not None or must_end:
            return text, "stop"
        if length - self._prompt_length >= limits.max_tokens:
            return text, "length"
        if length >= limits.context and limits.endless is None:
            return text, "context"
        if limits.pauses and self._pauses(piece):
            return text, "pause"
        return text, None

    def _pauses(self, piece: bytes) -> bool:
        """Return whether this piece completes a pause string. Leading spaces do not count."""
        pauses = [pause.encode() for pause in self._limits.pauses]
        recent = self._pause_window + piece
        if not self._pause_window:
            recent = recent.lstrip()
        is_complete = any(pause in recent for pause in pauses)
        # The longest pause string bounds how far back a match can start.
        self._pause_window = recent[-max(map(len, pauses)) :]
        return is_complete

    def finish(self) -> str:
        """Return the text that was held back as a possible start of a stop string."""
        return self.text.finish()


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of draft tokens.

    Node n has a token and a parent with a smaller index (-1: the text itself). Of the children of
    one node, the most likely comes first.
    """

    tokens: Sequence[int]
    parents: Sequence[int]


class Drafter(Protocol):
    """Proposes the next tokens of one text, on the engine's thread.

    A rejected draft costs time and changes nothing. A drafter that raises is not called again.
    """

    def propose(self, tokens: Sequence[int], most: int) -> list[int] | DraftTree:
        """Return draft tokens that follow `tokens`, a chain of at most `most` or a tree of at most
        that depth; or none. `tokens` must not be changed."""

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        """Learn from the round that started with `propose`; return a note for the user, if any.

        Called after every round, also after one without a draft (`proposed` is 0), so that the
        seconds from proposing to sampling can be compared.
        """
        return None


@runtime_checkable
class RecordingDrafter(Protocol):
    """A drafter that is shown the whole text when it has ended."""

    def record(self, tokens: Sequence[int]) -> None:
        """Take the tokens of prompt and text."""


@runtime_checkable
class ReadingDrafter(Protocol):
    """A drafter that also reads the model's hidden states, from the steps that computed them."""

    @property
    def reads(self) -> tuple[int, ...]:
        """The hidden states to return from the next step: n is the one before layer n."""

    def needs(self, tokens: Sequence[int]) -> int:
        """Return the first position of a text whose hidden states are needed; tokens before it may
        come from the KV cache."""

    def see(self, first: int, vectors: Floats) -> None:
        """Take the hidden states [layers read, tokens, width] of the text from position `first` on;
        earlier ones from there on are outdated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One text to generate, with all options checked."""

    prompt: tuple[int, ...]
    settings: SamplingSettings
    limits: Limits
    written: tuple[Step, ...] = ()  # steps after the prompt already, when a text is resumed
    priority: int = 0
    drafter: Drafter | DraftMaker | None = None
    guards: GuardPolicy | None = None
    grammar: Grammar | None = None  # of the answer, after the reasoning
    thinking: ReasoningSpec | None = None  # how the text contains reasoning; None: it does not
    adapter: str | None = None  # name of the LoRA adapter
    cached: bool = True  # False: the whole text is computed again for every token
    interventions: tuple[Intervention, ...] = ()  # changes inside the model

    def branch_interventions(self, length: int = 0) -> BranchInterventions | None:
        """Return the interventions of the branch that computes the text; `length`: of the text so
        far, which may have outgrown the context."""
        if not self.interventions:
            return None
        kept = self.limits.endless or 0
        return resolve(
            self.interventions, len(self.prompt), kept, self.limits.num_truncated(length)
        )

    def __repr__(self) -> str:
        return f"<Request {count(len(self.prompt), 'token')}, {self.settings!r}>"


DraftMaker = Callable[[Request], Drafter]
"""Creates the drafter of one request; requests share what is expensive to prepare."""


# -- Every option of a generation: its name, its type, and what it does

_Flag = bool | None
_Int = int | None
_Float = float | None


class SamplingOptions(TypedDict, total=False):
    """How a token is sampled; `sampling/settings.py` checks the values."""

    temperature: Annotated[_Float, "randomness of sampling; 0: always the most likely token (0.8)"]
    top_k: Annotated[_Int, "sample from the k most likely tokens; 0: off (40)"]
    top_p: Annotated[
        _Float, "sample from the smallest set with this total probability; 1: off (0.95)"
    ]
    min_p: Annotated[_Float, "drop tokens below min_p × the top probability; 0: off (0.05)"]
    typical_p: Annotated[
        _Float, "sample from the most typical tokens of this total probability; 1: off (1)"
    ]
    eta: Annotated[_Float, "epsilon of eta sampling; 0: off (0)"]
    top_n_sigma: Annotated[
        _Float, "keep logits within n standard deviations of the top one; 0: off (0)"
    ]
    xtc_probability: Annotated[
        _Float, "probability of applying XTC (exclude top choices); 0: off (0)"
    ]
    xtc_threshold: Annotated[_Float, "probability from which on XTC excludes a token (0.1)"]
    repetition_penalty: Annotated[_Float, "divide the logits of tokens that occurred; 1: off (1)"]
    frequency_penalty: Annotated[_Float, "subtracted from a logit for every occurrence (0)"]
    presence_penalty: Annotated[
        _Float, "subtracted once from the logit of a token that occurred (0)"
    ]
    penalty_window: Annotated[_Int, "number of last tokens that penalties count; -1: all (-1)"]
    penalize_prompt: Annotated[_Flag, "whether penalties count the prompt too (True)"]
    no_repeat_ngram: Annotated[_Int, "no n-gram of this length occurs twice; 0: off (0)"]
    dry_multiplier: Annotated[_Float, "DRY: penalty for continuing a repetition; 0: off (0)"]
    dry_base: Annotated[_Float, "growth of the DRY penalty with each repeated token (1.75)"]
    dry_allowed_length: Annotated[_Int, "repetitions shorter than this have no DRY penalty (2)"]
    dry_window: Annotated[_Int, "number of last tokens that DRY searches; -1: all (-1)"]
    dry_breakers: Annotated[
        Sequence[int | Sequence[int]] | None,
        "tokens or token sequences that end a repetition for DRY",
    ]
    logit_bias: Annotated[
        Mapping[Any, float] | None,  # keys are token ids or texts
        "added to logits, by token id or by text that is one token; -inf bans",
    ]
    dynatemp_range: Annotated[_Float, "temperature ± this, by the entropy of the model (0)"]
    dynatemp_exponent: Annotated[_Float, "exponent of the dynamic temperature (1)"]
    mirostat_tau: Annotated[_Float, "mirostat 2: target surprise in bits; 0: off (0)"]
    mirostat_eta: Annotated[_Float, "mirostat learning rate (0.1)"]
    stages: Annotated[
        Sequence[str | StageFunction | CustomStage | EllipsisType] | None,
        "order of the sampling stages: names, functions of (tokens, logits), ... for the default",
    ]


class Options(SamplingOptions, total=False):
    """All options of a generation."""

    max_tokens: Annotated[_Int, "maximum number of new tokens (256)"]
    stop: Annotated[
        str | Sequence[str] | None, "strings that end the text; they are not part of it"
    ]
    seed: Annotated[_Int, "same seed, same text; without one it is random"]
    sample: Annotated[_Int, "index of the sample, when one seed gives several texts (0)"]
    top: Annotated[_Int, "number of candidate tokens recorded at each step (0)"]
    explain: Annotated[_Flag, "record how each token was sampled, stage by stage (False)"]
    end: Annotated[_Flag, "False: continue after an end token (True)"]
    priority: Annotated[_Int, "requests with a higher priority are scheduled first (0)"]
    adapter: Annotated[str | None, "name of a loaded LoRA adapter"]
    interventions: Annotated[
        Intervention | Sequence[Intervention | Mapping[str, Any]] | None,
        "changes to the values inside the model (none)",
    ]
    steer: Annotated[
        Any,  # see `lens/steering.py`
        "steering vectors by strength: {'happy': 1.5} or [(vector, 1.5)] (none)",
    ]
    cache: Annotated[_Flag, "False: compute the whole text again for every token (True)"]
    endless: Annotated[
        bool | int | None,
        "continue beyond the context and drop the oldest tokens; a number: how many first tokens "
        "stay visible (False)",
    ]
    thoughts: Annotated[
        bool | str | None, "separate reasoning from the answer (False; chats: True)"
    ]
    think_budget: Annotated[_Int, "maximum tokens of reasoning; 0: no reasoning"]
    json: Annotated[_Flag, "constrain the text to a JSON object (False)"]
    json_schema: Annotated[
        Any, "... to JSON of this schema: a dict, JSON text, or a pydantic class"
    ]
    regex: Annotated[str | None, "... to a match of this regular expression"]
    choice: Annotated[Sequence[str] | None, "... to one of these texts"]
    grammar: Annotated[str | GrammarSpec | None, "... to this Lark or GBNF grammar"]
    guard: Annotated[
        str | Sequence[str] | GuardPolicy | None,
        "rewind and continue differently: 'loop' on repetition, 'ban=word|another' on words",
    ]
    speculate: Annotated[
        str | Drafter | DraftMaker | None,
        "speculative decoding with 'lookup', 'mtp' or 'model:PATH'; the text stays the same "
        "(on a GPU with `exact`)",
    ]


_Function = TypeVar("_Function", bound=Callable[..., Any])
_GENERAL = [name for name in Options.__annotations__ if name not in SamplingOptions.__annotations__]
NAMES = (*_GENERAL, *SamplingOptions.__annotations__)
"""All option names, those of sampling last."""


def document_options(function: _Function) -> _Function:
    """Add all options to a function's help and signature."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in NAMES
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__doc__ = f"{inspect.getdoc(function)}\n\nOptions and their defaults:\n\n{_LIST}"
    return function


_HINTS = get_type_hints(Options, include_extras=True)
_LIST = "\n".join(f"{name:<20} {_HINTS[name].__metadata__[0]}" for name in NAMES)


# -- Errors for unknown options: option names of other libraries, and what to write here

_SYNONYMS = {
    "max_tokens": "max_new_tokens max_completion_tokens max_output_tokens num_predict n_predict",
    "temperature": "temp",
    "seed": "random_seed manual_seed generator",
    "repetition_penalty": "repeat_penalty",
    "penalty_window": "repeat_last_n repetition_penalty_range",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "typical_p": "typical",
    "eta": "eta_cutoff",
    "dry_breakers": "dry_sequence_breakers",
    "dry_window": "dry_penalty_last_n",
    "stop": "stop_sequences stop_strings stop_words",
    "stages": "samplers sampler_order",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice choices",
    "grammar": "guided_grammar",
    "cache": "use_cache",
}
_OUR_NAME = {alias: name for name, aliases in _SYNONYMS.items() for alias in aliases.split()}

_ADVICE = {
    "max_length max_context_length": "max_tokens counts new tokens only: write "
    "max_tokens={value!r} minus the length of the prompt",
    "min_tokens min_new_tokens min_length": "end=False ignores end tokens and writes up to "
    "max_tokens",
    "do_sample": "temperature=0 is greedy; above 0 tokens are sampled",
    "num_return_sequences n num_samples": "write lm.samples(prompt, {value!r})",
    "best_of": "write lm.best_of(prompt, {value!r})",
    "num_beams beams beam_width": "write lm.beam(prompt, beams={value!r})",
    "num_beam_groups": "write lm.beam(prompt, beams=4, groups={value!r})",
    "mirostat mirostat_mode": "mirostat_tau=5 turns it on (version 2)",
    "epsilon_cutoff tfs_z tfs top_a": "not supported; min_p does nearly the same",
    "eos_token_id eos_token stop_token_ids": "the model's own end tokens end a text (lm.end_ids); "
    "end=False ignores them, and stop= takes strings",
    "ignore_eos": "write end=False",
    "pad_token_id pad_token padding truncation attention_mask": "there is no padding: leave it out",
    "return_full_text echo": "a result has only the new text; put the prompt before it yourself",
    "top_logprobs logprobs n_probs output_scores output_logits return_dict_in_generate": "every "
    "step has its logprob; top=5 records candidates, explain=True how it was sampled",
    "stream streamer": "write lm.stream(prompt)",
    "logits_processor logits_processors": "write stages=[your_function, ...], a function of "
    "(tokens, logits)",
    "bad_words bad_words_ids": "guard='ban=word|another' bans words, logit_bias={{' word': "
    "float('-inf')}} bans a token",
    "response_format format": "write json=True, or json_schema= for JSON of a schema",
    "assistant_model draft_model prompt_lookup_num_tokens": "speculate='model:PATH' or "
    "speculate='lookup' turns on speculative decoding",
    "messages": "write lm.chat([{{'role': 'user', 'content': '...'}}])",
    "system system_prompt": "write lm.chat(question, system={value!r})",
    "batch_size": "pass a list of prompts: they are one batch",
    "tools": "lm.chat takes them",
    "device dtype n_ctx num_ctx context num_thread threads": "set it when loading: see "
    "help(unspool.load)",
}
_ADVICE_OF = {name: advice for names, advice in _ADVICE.items() for name in names.split()}


def unknown_option(name: str, value: Any) -> SettingsError:
    """Return the error for an unknown option, with what to write instead."""
    return SettingsError(f"there is no option {name!r}{_suggestion(name, value)}")


def _suggestion(name: str, value: Any) -> str:
    if name in _OUR_NAME:
        return f": write {_OUR_NAME[name]}={value!r}"
    if name in _ADVICE_OF:
        return f": {_ADVICE_OF[name].format(value=value)}"
    close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; help(lm.generate) lists all options"
