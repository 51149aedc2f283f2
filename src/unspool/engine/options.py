"""Every option of a generation: its name, its type, and what it does.

This is the only list. Type checkers and editors read it where a function takes
`**options: Unpack[Options]`; `tells_options` writes it into the function's help; `request_options`
rejects names that are not in it. None means the default everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Annotated, Any, TypedDict, TypeVar, get_type_hints

from unspool.engine.request import Drafter, DraftMaker
from unspool.sampling import GrammarSpec
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.own_stage import CustomStage, StageFunction

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
    cache: Annotated[_Flag, "False: compute the whole text again for every token (True)"]
    endless: Annotated[
        bool | int | None,
        "continue beyond the context and drop the oldest tokens; a number: how many first tokens "
        "stay visible (False)",
    ]
    thoughts: Annotated[
        bool | str | None,
        "separate reasoning from the answer (False; chats: True)",
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
        "speculative decoding with 'lookup', 'head' or 'model:PATH': the same text, faster",
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
