"""What the requests of several endpoints have in common.

Sampling settings stand beside the rest, or under one key, `unspool`, with what only Unspool has:
{"model": ..., "messages": [...], "min_p": 0.1, "unspool": {"guard": ["loop"], "trace": true}}

OpenAI's and Anthropic's APIs have more than is here. A parameter that they know and this server
does not have is refused by its name and with the reason, unless its value asks for nothing. What
other servers know is in `foreign.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    StringConstraints,
    model_validator,
)

from unspool.sampling.settings import STAGE_SETTINGS, SamplingSettings
from unspool.serve.core.foreign import UNUSED, in_our_words
from unspool.serve.http.errors import bad_request, known_names, unsupported
from unspool.text.chat.messages import ONLY_TEXT

LARGEST_SEED = (1 << 63) - 1


class Strict(BaseModel):
    """A request in which an unknown parameter is refused, never ignored."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        known_names.update(cls.model_fields)  # to tell who mistyped one which was meant

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, given: Any) -> Any:
        """True is 1 in Python and so to pydantic; in JSON it is no number."""
        if isinstance(given, dict):
            for name, field in cls.model_fields.items():
                value = given.get(field.alias or name)
                annotation: Any = field.annotation
                if _holds_bool(value) and _takes_only_numbers(annotation):
                    kind = "a number" if isinstance(value, bool) else "numbers"
                    message = f"{name} must be {kind}, got a boolean"
                    raise bad_request(message, name, "invalid_value")
        return given


def _holds_bool(value: Any) -> bool:
    """Whether a value is a boolean, or a list or object that holds one."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, bool) or (isinstance(value, list) and any(map(_holds_bool, value)))


@cache
def _takes_only_numbers(annotation: Hashable) -> bool:
    """Whether a field's values have numbers in them, and nothing that may be a boolean."""
    types = set(_leaf_types(annotation))
    return bool(types & {int, float}) and types <= {int, float, str, type(None)}


def _leaf_types(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of, without its containers."""
    if get_origin(annotation) is Annotated:
        yield from _leaf_types(get_args(annotation)[0])
    elif get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif get_args(annotation):
        for part in get_args(annotation):
            yield from _leaf_types(part)
    else:
        yield annotation


ShortText = Annotated[str, StringConstraints(max_length=1000)]
StopStrings = str | list[str]
Bias = dict[str, float]
TextBias = list[tuple[StrictInt | StrictStr, float]]  # llama.cpp's: tokens by id or by text
Seed = Annotated[int, Field(ge=-LARGEST_SEED, le=LARGEST_SEED)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_PROMPTS = 256
Prompts = (
    str
    | Tokens
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
)


def as_list(given: Prompts) -> list[str | list[int]]:
    """One text or several, each as words or as token ids: always as a list."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return [*given]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # we add none, so there is none to leave out


class Prediction(Strict):
    """A guess of what the answer will be: read as a draft, which makes it come faster."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else join_parts(parts, "prediction")


def join_parts(parts: list[dict[str, Any]], where: str) -> str:
    """Content that comes in parts, as one text."""
    for part in parts:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise unsupported(f"{where} of type {part.get('type')!r:.40}", ONLY_TEXT)
        if not isinstance(part.get("text"), str):
            raise bad_request(f"a part of {where} has no text", where)
    return "".join(part["text"] for part in parts)


def stops(given: StopStrings | None) -> tuple[str, ...]:
    found = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if len(found) > MAX_STOPS:
        raise bad_request(f"stop has {len(found)} strings; at most {MAX_STOPS} are allowed", "stop")
    if any(len(text) > 1000 for text in found):
        raise bad_request("a stop string may have at most 1,000 characters", "stop")
    return found


def biases(given: Bias | None) -> dict[int, float]:
    """Token ids come as texts in JSON."""
    check_num_biases(given or ())
    found: dict[int, float] = {}
    for token, amount in (given or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise bad_request(
                f"logit_bias names token {token[:40]!r}; it may be a token id", "logit_bias"
            )
        if not -100 <= amount <= 100:
            raise bad_request(
                f"logit_bias of {token} is {amount}; it may be from -100 to 100", "logit_bias"
            )
        # As OpenAI says: 100 means only this one, -100 means never.
        found[int(token)] = {100.0: float("inf"), -100.0: float("-inf")}.get(amount, amount)
    return found


def text_biases(pairs: TextBias, encode: Callable[[str], list[int]]) -> dict[int, float]:
    """Biases of llama.cpp by token id; a text stands for each of its tokens."""
    check_num_biases(pairs)
    found: dict[int, float] = {}
    for token, amount in pairs:
        ids = [token] if isinstance(token, int) else encode(token)
        found |= dict.fromkeys(ids, amount)
    return found


def check_num_biases(given: Collection[Any]) -> None:
    if len(given) > MAX_BIASES:
        raise bad_request(
            f"logit_bias may name at most {MAX_BIASES} tokens, got {len(given)}", "logit_bias"
        )


# -- Unspool's own ---------------------------------------------------------------------------

Number = float | None
Whole = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None
MAX_CANDIDATES = 100
LONGEST_GUARD = 2_000  # characters
Breaker = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=32)]
JudgeText = Annotated[str, Field(max_length=LONGEST_GUARD)]
GuardText = Annotated[str, Field(max_length=LONGEST_GUARD)]


class Sampling(Strict):
    """Sampling settings; those left out have Unspool's usual values."""

    temperature: Number = None
    top_k: Whole = None
    top_p: Number = None
    min_p: Number = None
    typical_p: Number = None
    eta: Number = None
    top_n_sigma: Number = None
    xtc_probability: Number = None
    xtc_threshold: Number = None
    repetition_penalty: Number = None
    frequency_penalty: Number = None
    presence_penalty: Number = None
    penalty_window: Whole = None
    penalize_prompt: bool | None = None
    no_repeat_ngram: Whole = None
    dry_multiplier: Number = None
    dry_base: Number = None
    dry_allowed_length: Whole = None
    dry_window: Whole = None
    dry_breakers: list[Breaker] | None = Field(None, max_length=64)
    dynatemp_range: Number = None
    dynatemp_exponent: Number = None
    mirostat_tau: Number = None
    mirostat_eta: Number = None
    stages: list[str] | None = Field(
        None, max_length=len(STAGE_SETTINGS), description="the stages in your own order"
    )


assert {*SamplingSettings.__dataclass_fields__} == {*Sampling.model_fields, "seed", "logit_bias"}


class Constraints(Sampling):
    """Sampling settings, and what the text may be."""

    regex: str | None = Field(None, description="the text must match this")
    grammar: str | None = Field(None, description="a Lark or GBNF grammar")
    choice: list[str] | None = Field(None, description="the text must be one of these")
    json_schema: dict[str, Any] | None = Field(None, description="the text must be such JSON")
    end: bool = Field(True, description="false: go on where the model would end")


class Think(BaseModel):
    """A search for a better answer. What else is given here are options of the policy."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    policy: ShortText = Field("best-of", description="best-of, vote, beam, dvts, mcts, ...")
    judge: JudgeText | None = Field(
        None, description="logprob, certainty, regex:PATTERN, ask, vote, vote+JUDGE, ..."
    )
    budget: int | None = Field(
        None, ge=1, lt=1 << 31, description="tokens it may compute (2000, or what the server lets)"
    )

    def policy_options(self) -> dict[str, Any]:
        """What the policy is told."""
        return dict(self.model_extra or {})


class Extension(Constraints):
    """Sampling stages and their order, guards, grammars, and how much of each step to tell."""

    guard: GuardText | list[GuardText] | None = Field(
        None, description="loop, ban=WORD|WORD, pattern=REGEX, surprise=NATS; each also :stop"
    )
    speculate: Literal["lookup", "head"] | None = Field(
        None,
        description="guess ahead: from what stands in the text already, or by a head that was "
        "trained for the model",
    )
    trace: bool = Field(False, description="tell every step: candidates, stages, draw")
    top: int = Field(5, ge=0, le=MAX_CANDIDATES, description="candidates that a trace tells")
    cache: bool = Field(
        True, description="false: the whole text is read again for every token, to see the cost"
    )
    endless: StrictBool | Annotated[StrictInt, Field(ge=1, lt=1 << 31)] | None = Field(
        None,
        description="go on beyond the context, forgetting the oldest tokens; a number: how many of "
        "the first stay in view",
    )
    sample: int = Field(0, ge=0, lt=1 << 31, description="which of the seed's many texts")
    priority: int = Field(0, ge=-100, le=100)
    think: Think | None = Field(None, description="search for the answer (/v1/chat/completions)")

    def options(self) -> dict[str, Any]:
        """Those that were given, as `LanguageModel.stream` takes them."""
        found = self.model_dump(exclude_none=True, exclude={"trace", "top"}, exclude_defaults=True)
        if isinstance(self.guard, list) and not 0 < len(self.guard) <= MAX_STOPS:
            raise bad_request(f"unspool.guard may name 1 to {MAX_STOPS} guards", "unspool.guard")
        if self.think is not None:
            raise bad_request("unspool.think is for /v1/chat/completions", "unspool.think")
        if "stages" in found:
            found["stages"] = tuple(found["stages"])
        if self.trace:
            found.update(explain=True, top=self.top)
        return found


# -- forms -----------------------------------------------------------------------------------

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Reasons = Mapping[str, str]
Values = Mapping[str, Collection[Any]]


class ExtensionWithSeed(Extension):
    """For APIs that know no seed."""

    seed: Seed | None = Field(None, description="same seed, same text")


class PartialApi(Strict):
    """Something that has more parameters elsewhere than here."""

    unsupported_fields: ClassVar[Reasons] = {}  # these, and why they are not here
    noop_values: ClassVar[Values] = {}  # values of them that ask for nothing

    @model_validator(mode="before")
    @classmethod
    def _refuse_absent(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            default = (None, False, [], {}, *cls.noop_values.get(name, ()))
            if name in cls.unsupported_fields and value not in default:
                raise unsupported(name, cls.unsupported_fields[name])
        return {name: value for name, value in given.items() if name not in cls.unsupported_fields}


def by_type(models: Mapping[str, str], default: str = "") -> Discriminator:
    """Which model of a union is meant: found by `type`, before it is checked, so that an error is
    about that one alone. `models` gives each type's tag; `default` is the type of what has none."""

    def tag_of(given: Any) -> str | None:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return models.get(default if kind is None else str(kind))

    expected = ", ".join(models)
    return Discriminator(tag_of, custom_error_type="wrong_type", custom_error_message=expected)


class ForeignRequest(PartialApi):
    """A request in which the words of other servers are understood."""

    keep_alive: float | ShortText | None = Field(
        None, description="how long the model stays when nobody uses it: seconds, or 5m; 0: unload"
    )
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _translate(cls, given: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(given, dict):
            return read(given)
        ours, ignored = cls._translated(given)
        unused = ours.pop(UNUSED, ())
        found = read(ours)
        for name in unused:  # settings of samplers that are not listed: checked, but not used
            if name in cls.model_fields:
                setattr(found, name, None)
        found._ignored += ignored
        return found

    @classmethod
    def _translated(cls, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        return in_our_words(given, keep={*cls.model_fields, *cls.unsupported_fields})

    @property
    def ignored(self) -> list[str]:
        """What was asked for, and is of no meaning here."""
        return self._ignored


class LoraScale(Strict):
    """How strongly an adapter of `/lora-adapters` is applied."""

    id: StrictInt
    scale: float


class SamplingRequest(ForeignRequest, Constraints):
    """What chats and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    logit_bias: Bias | TextBias | None = None
    stop: StopStrings | None = None
    seed: Seed | None = None
    dry_sequence_breakers: list[ShortText] | None = Field(None, max_length=64)
    unspool: Extension | None = None
    # llama.cpp's
    timings_per_token: StrictBool | None = Field(None, description="timings in every chunk")
    return_progress: StrictBool | None = Field(
        None, description="in a stream, chunks that say how much of the prompt is computed"
    )
    verbose: StrictBool | None = Field(
        None, description="the prompt as text in the answer, under __verbose (not in streams)"
    )
    lora: list[LoraScale] | None = Field(
        None, max_length=64, description="adapters, by the ids of /lora-adapters"
    )

    @property
    def is_endless(self) -> bool:
        """Whether the text, and the prompt, may be longer than the context."""
        return self.unspool is not None and bool(self.unspool.endless)
