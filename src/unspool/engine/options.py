"""Every option of a text: its name, its type, and what it does.

This is the one list of them. Type checkers and editors read it where a function takes
`**options: Unpack[Options]`; `tells_options` writes it into the function's help; `request_options`
knows unknown names by it. None stands for the usual value everywhere.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Annotated, Any, TypedDict, TypeVar

from unspool.engine.request import Drafter, DraftMaker
from unspool.sampling import GrammarSpec
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.own_stage import OwnStage, StageFunction

_Flag = bool | None
_Whole = int | None
_Number = float | None


class SamplingOptions(TypedDict, total=False):
    """How a token is picked; `sampling/settings.py` says what each may be."""

    temperature: Annotated[_Number, "how freely to draw; 0 always takes the likeliest token (0.8)"]
    top_k: Annotated[_Whole, "draw from so many of the likeliest; 0: off (40)"]
    top_p: Annotated[_Number, "draw from the fewest whose probabilities reach this; 1: off (0.95)"]
    min_p: Annotated[_Number, "drop what is below this share of the likeliest; 0: off (0.05)"]
    typical_p: Annotated[_Number, "draw from this much mass, most typical first; 1: off (1)"]
    eta: Annotated[_Number, "the epsilon of eta sampling; 0: off (0)"]
    top_n_sigma: Annotated[_Number, "within so many deviations of the best logit; 0: off (0)"]
    xtc_probability: Annotated[_Number, "how often to exclude top choices; 0: off (0)"]
    xtc_threshold: Annotated[_Number, "from which probability on a choice is a top one (0.1)"]
    repetition_penalty: Annotated[_Number, "divides the logit of what occurred; 1: off (1)"]
    frequency_penalty: Annotated[_Number, "subtracted for every occurrence (0)"]
    presence_penalty: Annotated[_Number, "subtracted once for what occurred (0)"]
    penalty_window: Annotated[_Whole, "how many last tokens the penalties see; -1: all (-1)"]
    penalize_prompt: Annotated[_Flag, "whether the prompt is among them (True)"]
    no_repeat_ngram: Annotated[_Whole, "no run of so many tokens occurs twice; 0: off (0)"]
    dry_multiplier: Annotated[_Number, "DRY, a penalty for going on with a repeat; 0: off (0)"]
    dry_base: Annotated[_Number, "by how much it grows with every further token (1.75)"]
    dry_allowed_length: Annotated[_Whole, "repeats shorter than this are free (2)"]
    dry_window: Annotated[_Whole, "how many last tokens DRY sees; -1: all (-1)"]
    dry_breakers: Annotated[
        Sequence[int | Sequence[int]] | None, "tokens, and runs of them, that no repeat crosses"
    ]
    logit_bias: Annotated[
        Mapping[Any, float] | None,  # keys of two types are none that a checker can name
        "added to logits, by token id or by text that is one token; -inf bans",
    ]
    dynatemp_range: Annotated[_Number, "temperature ± this, by how unsure the model is (0)"]
    dynatemp_exponent: Annotated[_Number, "how steeply it follows (1)"]
    mirostat_tau: Annotated[_Number, "mirostat: the surprise aimed at, in bits; 0: off (0)"]
    mirostat_eta: Annotated[_Number, "how fast it is corrected (0.1)"]
    stages: Annotated[
        Sequence[str | StageFunction | OwnStage | EllipsisType] | None,
        "the order: names, functions of (tokens, logits), ... for the usual ones",
    ]


class Options(SamplingOptions, total=False):
    """Everything that can be asked of a text."""

    max_tokens: Annotated[_Whole, "how many tokens at the most (256)"]
    stop: Annotated[str | Sequence[str] | None, "strings that end the text, and are no part of it"]
    seed: Annotated[_Whole, "same seed, same text; without one it is another each time"]
    sample: Annotated[_Whole, "the number of the sample, when one seed gives several texts (0)"]
    top: Annotated[_Whole, "how many candidates each step tells (0)"]
    explain: Annotated[_Flag, "each step tells how it was picked, stage by stage (False)"]
    end: Annotated[_Flag, "False: go on when the model writes an end token (True)"]
    priority: Annotated[_Whole, "higher goes first when many wait (0)"]
    adapter: Annotated[str | None, "the name of a loaded adapter to write with"]
    cache: Annotated[_Flag, "False: read the whole text again for every token (True)"]
    endless: Annotated[
        bool | int | None,
        "go on beyond the context, forgetting the oldest tokens; a number: how many of the first "
        "stay in view (False)",
    ]
    thoughts: Annotated[
        bool | str | None,
        "the prompt asks for an answer: tell thoughts apart from it (False; chats: True)",
    ]
    think_budget: Annotated[_Whole, "close a thought after so many tokens; 0: none"]
    json: Annotated[_Flag, "the text must be a JSON object (False)"]
    json_schema: Annotated[Any, "... JSON of this schema: a dict, JSON text, or a pydantic class"]
    regex: Annotated[str | None, "... a match of this regular expression"]
    choice: Annotated[Sequence[str] | None, "... one of these texts"]
    grammar: Annotated[str | GrammarSpec | None, "... of this Lark or GBNF grammar"]
    guard: Annotated[
        str | Sequence[str] | GuardPolicy | None,
        "what is taken back and written differently: 'loop', 'ban=word|another'",
    ]
    speculate: Annotated[
        str | Drafter | DraftMaker | None,
        "'lookup', 'head', 'model:PATH': guess ahead, the same text sooner",
    ]


_Function = TypeVar("_Function", bound=Callable[..., Any])
_OWN = [name for name in Options.__annotations__ if name not in SamplingOptions.__annotations__]
NAMES = (*_OWN, *SamplingOptions.__annotations__)
"""Of all options, those about the text as a whole first."""


def tells_options(function: _Function) -> _Function:
    """Write the options into a function's help and signature, for people who ask it there."""
    told = inspect.signature(function)
    rest = [p for p in told.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in NAMES]
    function.__signature__ = told.replace(parameters=rest + options)  # type: ignore[attr-defined]
    function.__doc__ = f"{inspect.getdoc(function)}\n\nOptions, and their usual values:\n\n{_LIST}"
    return function


_LIST = "\n".join(f"{n:<20} {Options.__annotations__[n].__metadata__[0]}" for n in NAMES)
