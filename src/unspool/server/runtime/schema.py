"""Request schemas that several endpoints share.

Sampling settings are top-level parameters, or under the key `unspool` with Unspool-specific ones:
{"model": ..., "messages": [...], "min_p": 0.1, "unspool": {"guard": ["loop"], "trace": true}}

A parameter of OpenAI's or Anthropic's API that this server lacks is rejected by name with the
reason, unless its value has no effect. Parameters of other servers are translated first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
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

from unspool.backends.interventions import Intervention, as_interventions
from unspool.decoding.speculative.controller import AdaptiveDrafter
from unspool.decoding.speculative.drafters import PredictedText
from unspool.engine.request import Drafter, Request
from unspool.sampling import GrammarSpec
from unspool.sampling.settings import STAGE_SETTINGS, SamplingSettings
from unspool.server.http.errors import bad_request, known_names, unsupported
from unspool.server.runtime.aliases import UNUSED, translate_names
from unspool.session import Session
from unspool.text.chat.messages import ONLY_TEXT

LARGEST_SEED = (1 << 63) - 1


class Strict(BaseModel):
    """A request whose unknown parameters are rejected, never ignored."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        known_names.update(cls.model_fields)  # for suggestions in error messages

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, params: Any) -> Any:
        """Reject booleans for numbers: pydantic accepts True as 1."""
        if isinstance(params, dict):
            for name, field in cls.model_fields.items():
                value = params.get(field.alias or name)
                annotation: Any = field.annotation
                if _holds_bool(value) and _takes_only_numbers(annotation):
                    kind = "a number" if isinstance(value, bool) else "numbers"
                    message = f"{name} must be {kind}, got a boolean"
                    raise bad_request(message, name, "invalid_value")
        return params


def _holds_bool(value: Any) -> bool:
    """Whether a value is a boolean, or a list or object that holds one."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, bool) or (isinstance(value, list) and any(map(_holds_bool, value)))


@cache
def _takes_only_numbers(annotation: Hashable) -> bool:
    """Whether a field takes numbers, and nothing that may be a boolean."""
    types = set(_leaf_types(annotation))
    return bool(types & {int, float}) and types <= {int, float, str, type(None)}


def _leaf_types(annotation: Any) -> Iterator[Any]:
    """The types in an annotation, without containers."""
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


def _check_prompt_kinds(value: Any) -> Any:
    kinds = {str, int, float, list}
    if isinstance(value, list) and value and len({type(item) for item in value} & kinds) != 1:
        raise ValueError("all items must be of one kind: strings, token ids, or lists of token ids")
    return value


Prompts = Annotated[
    str
    | Tokens
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)],
    BeforeValidator(_check_prompt_kinds),
]


def as_list(value: Prompts) -> list[str | list[int]]:
    """One prompt or several, each as text or token ids, as a list."""
    if isinstance(value, str) or isinstance(value[0], int):
        return [value]
    return [*value]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # none is added


class Prediction(Strict):
    """The expected answer, used as a draft for speculative decoding."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else join_parts(parts, "prediction")


def join_parts(parts: list[dict[str, Any]], where: str) -> str:
    """Join the text parts of a content."""
    for part in parts:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise unsupported(f"{where} of type {part.get('type')!r:.40}", ONLY_TEXT)
        if not isinstance(part.get("text"), str):
            raise bad_request(f"a part of {where} has no text", where)
    return "".join(part["text"] for part in parts)


def stops(value: StopStrings | None) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(strings) > MAX_STOPS:
        raise bad_request(f"stop may have at most {MAX_STOPS} strings, got {len(strings)}", "stop")
    if any(len(text) > 1000 for text in strings):
        raise bad_request("a stop string may have at most 1,000 characters", "stop")
    return strings


def biases(value: Bias | None) -> dict[int, float]:
    """Biases by token id; ids are strings in JSON."""
    check_num_biases(value or ())
    biases_by_token: dict[int, float] = {}
    for token, amount in (value or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise bad_request(
                f"logit_bias must name tokens by id, got {token[:40]!r}", "logit_bias"
            )
        if not -100 <= amount <= 100:
            raise bad_request(
                f"logit_bias of {token} must be -100 to 100, got {amount}", "logit_bias"
            )
        # As in OpenAI's API: 100 allows this token only, -100 forbids it.
        biases_by_token[int(token)] = {100.0: float("inf"), -100.0: float("-inf")}.get(
            amount, amount
        )
    return biases_by_token


def text_biases(pairs: TextBias, encode: Callable[[str], list[int]]) -> dict[int, float]:
    """llama.cpp's biases by token id; a text means each of its tokens."""
    check_num_biases(pairs)
    biases_by_token: dict[int, float] = {}
    for token, amount in pairs:
        ids = [token] if isinstance(token, int) else encode(token)
        biases_by_token |= dict.fromkeys(ids, amount)
    return biases_by_token


def check_num_biases(value: Collection[Any]) -> None:
    if len(value) > MAX_BIASES:
        raise bad_request(
            f"logit_bias may name at most {MAX_BIASES} tokens, got {len(value)}", "logit_bias"
        )


def parse_interventions(items: list[dict[str, Any]]) -> tuple[Intervention, ...]:
    """Interventions from their JSON form; SettingsError says what is wrong."""
    interventions = as_interventions(items)
    size = sum(intervention.nbytes for intervention in interventions)
    if size > MAX_INTERVENTION_BYTES:
        raise bad_request(
            f"the arrays of interventions may have at most {MAX_INTERVENTION_BYTES >> 20} MB, got "
            f"{size / 2**20:.1f} MB",
            "interventions",
        )
    return interventions


MAX_INTERVENTIONS = 64
MAX_STEERING_VECTORS = 16
MAX_SITES = 64
MAX_INTERVENTION_BYTES = 16 << 20
Number = float | None
Whole = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None
MAX_CANDIDATES = 100
MAX_GUARD_LENGTH = 2_000  # characters
Breaker = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=32)]
JudgeText = Annotated[str, Field(max_length=MAX_GUARD_LENGTH)]
GuardText = Annotated[str, Field(max_length=MAX_GUARD_LENGTH)]


class Sampling(Strict):
    """Sampling settings; omitted ones have Unspool's defaults."""

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
        None, max_length=len(STAGE_SETTINGS), description="order of the sampling stages"
    )


assert {*SamplingSettings.__dataclass_fields__} == {*Sampling.model_fields, "seed", "logit_bias"}


class Constraints(Sampling):
    """Sampling settings, and constraints on the text."""

    regex: str | None = Field(None, description="the text must match this")
    grammar: str | None = Field(None, description="a Lark or GBNF grammar")
    choice: list[str] | None = Field(None, description="the text must be one of these")
    json_schema: dict[str, Any] | None = Field(
        None, description="the text must be JSON of this schema"
    )
    end: bool = Field(True, description="false: continue where the model would end")


class Think(BaseModel):
    """A search for a better answer. Further fields are options of the policy."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    policy: ShortText = Field("best-of", description="best-of, vote, beam, dvts, mcts, ...")
    judge: JudgeText | None = Field(
        None, description="logprob, certainty, regex:PATTERN, ask, vote, vote+JUDGE, ..."
    )
    budget: int | None = Field(
        None, ge=1, lt=1 << 31, description="tokens it may compute (2000, or the server's limit)"
    )

    def policy_options(self) -> dict[str, Any]:
        """Options of the policy."""
        return dict(self.model_extra or {})


class HiddenStates(Strict):
    """Hidden states to return, of each text: prompt and generated tokens."""

    sites: list[ShortText] = Field(
        default_factory=lambda: ["resid_post"],
        min_length=1,
        max_length=MAX_SITES,
        description="sites, or hook names of TransformerLens such as blocks.5.hook_resid_post",
    )
    layers: list[Annotated[int, Field(ge=-(1 << 16), lt=1 << 16)]] | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="from 0, negative from the end; null: all that have the site",
    )
    positions: (
        Literal["last", "all", "generated"]
        | Annotated[list[Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]], Field(min_length=1)]
    ) = Field("last", description="of the tokens of the text; negative numbers: from the end")
    dtype: Literal["float32", "float16"] = "float32"


class Returned(Strict):
    """What the response has beside the text."""

    hidden_states: HiddenStates


class Extension(Constraints):
    """Sampling stages and their order, guards, grammars, and how much of each step to report."""

    guard: GuardText | list[GuardText] | None = Field(
        None, description="loop, ban=WORD|WORD, pattern=REGEX, surprise=NATS; each also :stop"
    )
    speculate: Literal["lookup", "mtp"] | None = Field(
        None,
        description="speculative decoding: drafts by prompt lookup, or by the MTP layers of the "
        "checkpoint",
    )
    trace: bool = Field(False, description="report every step: candidates, stages, draw")
    top: int = Field(5, ge=0, le=MAX_CANDIDATES, description="candidates in a trace")
    cache: bool = Field(
        True, description="false: recompute the whole text for every token, to see the cost"
    )
    endless: StrictBool | Annotated[StrictInt, Field(ge=1, lt=1 << 31)] | None = Field(
        None,
        description="continue beyond the context, dropping the oldest tokens; a number: how many "
        "of the first tokens stay visible",
    )
    interventions: list[dict[str, Any]] | None = Field(
        None,
        max_length=MAX_INTERVENTIONS,
        description="changes inside the model: site (or hook), op, layers, positions, heads",
    )
    steer: dict[ShortText, float] | None = Field(
        None,
        max_length=MAX_STEERING_VECTORS,
        description="strengths of steering vectors, by the names that the model has",
    )
    sample: int = Field(0, ge=0, lt=1 << 31, description="index of the sample for this seed")
    priority: int = Field(0, ge=-100, le=100)
    think: Think | None = Field(None, description="search for the answer (/v1/chat/completions)")
    return_: Returned | None = Field(
        None, alias="return", description="hidden states of the texts, under `unspool`"
    )

    def options(self) -> dict[str, Any]:
        """Options of `LanguageModel.stream` that the request sets."""
        options = self.model_dump(
            exclude_none=True, exclude={"trace", "top", "return_"}, exclude_defaults=True
        )
        if isinstance(self.guard, list) and not 0 < len(self.guard) <= MAX_STOPS:
            raise bad_request(f"unspool.guard may name 1 to {MAX_STOPS} guards", "unspool.guard")
        if self.think is not None:
            raise bad_request("unspool.think is for /v1/chat/completions", "unspool.think")
        if "stages" in options:
            options["stages"] = tuple(options["stages"])
        if self.interventions is not None:
            options["interventions"] = parse_interventions(self.interventions)
        if self.return_ is not None:
            if self.endless:
                raise bad_request(
                    "unspool.return cannot be combined with endless: the first tokens of the text "
                    "may be dropped",
                    "unspool.return",
                )
            options["hidden_states"] = self.return_.hidden_states
        if self.trace:
            options.update(explain=True, top=self.top)
        return options


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Reasons = Mapping[str, str]
Values = Mapping[str, Collection[Any]]


class ExtensionWithSeed(Extension):
    """For APIs without a seed."""

    seed: Seed | None = Field(None, description="same seed, same text")


class PartialApi(Strict):
    """A schema of which this server lacks some parameters."""

    unsupported_fields: ClassVar[Reasons] = {}  # and why
    noop_values: ClassVar[Values] = {}  # values of them that have no effect

    @model_validator(mode="before")
    @classmethod
    def _refuse_absent(cls, params: Any) -> Any:
        if not isinstance(params, dict):
            return params
        for name, value in params.items():
            default = (None, False, [], {}, *cls.noop_values.get(name, ()))
            if name in cls.unsupported_fields and value not in default:
                raise unsupported(name, cls.unsupported_fields[name])
        return {name: value for name, value in params.items() if name not in cls.unsupported_fields}


def by_type(models: Mapping[str, str], default: str = "") -> Discriminator:
    """Select the member of a union by `type` before validation, so that errors are about it alone.

    Args:
        models: The tag of each type.
        default: The type of objects without one.
    """

    def tag_of(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return models.get(default if kind is None else str(kind))

    expected = ", ".join(models)
    return Discriminator(tag_of, custom_error_type="wrong_type", custom_error_message=expected)


class ForeignRequest(PartialApi):
    """A request that accepts parameters of other servers."""

    keep_alive: float | ShortText | None = Field(
        None, description="how long the idle model stays loaded: seconds, or 5m; 0: unload"
    )
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _translate(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict):
            return read(value)
        translated, ignored = cls._translated(value)
        unused = translated.pop(UNUSED, ())
        request = read(translated)
        for name in unused:  # settings of samplers that are not listed: validated, but not used
            if name in cls.model_fields:
                setattr(request, name, None)
        request._ignored += ignored
        return request

    @classmethod
    def _translated(cls, params: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        return translate_names(params, keep={*cls.model_fields, *cls.unsupported_fields})

    @property
    def ignored(self) -> list[str]:
        """Parameters that have no effect."""
        return self._ignored


class LoraScale(Strict):
    """The scale of an adapter of `/lora-adapters`."""

    id: StrictInt
    scale: float


class SamplingRequest(ForeignRequest, Constraints):
    """Parameters that chats and completions share."""

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
        None, description="in a stream: chunks with the progress of the prompt"
    )
    verbose: StrictBool | None = Field(
        None, description="the prompt as text in the answer, under __verbose (not in streams)"
    )
    id_slot: StrictInt | None = Field(None, description="the slot that can be saved afterwards")
    lora: list[LoraScale] | None = Field(
        None, max_length=64, description="adapters, by the ids of /lora-adapters"
    )

    @property
    def is_endless(self) -> bool:
        """Whether the text, and the prompt, may be longer than the context."""
        return self.unspool is not None and bool(self.unspool.endless)


# -- Translate the parameters of an API to the options of `LanguageModel.stream`

_GRAMMARS = ("json", "json_schema", "regex", "grammar", "choice")


def sampling_options(
    lm: Session, body: SamplingRequest, *, top: int, **extra: Any
) -> dict[str, Any]:
    """The options that completions and chats share; `extra` are further ones."""
    values = {name: getattr(body, name) for name in Constraints.model_fields if name != "end"}
    if (body.frequency_penalty or body.presence_penalty) and body.repetition_penalty is None:
        # OpenAI penalizes generated tokens only, not the prompt.
        values["penalize_prompt"] = values["penalize_prompt"] or False
    values |= extra
    if body.stages is not None:
        values["stages"] = tuple(body.stages)
    if body.dry_sequence_breakers is not None:
        runs = [
            lm.tokenizer.encode(text)
            for text in body.dry_sequence_breakers
            if lm.tokenizer.missing_character(text) is None  # else it never occurs
        ]
        values["dry_breakers"] = [run for run in runs if run]
    options: dict[str, Any] = {"top": top, "explain": False, "stop": stops(body.stop)}
    options |= {name: value for name, value in values.items() if value is not None}
    options |= {} if body.seed is None else {"seed": body.seed}
    if body.logit_bias:
        if isinstance(body.logit_bias, list):
            options["logit_bias"] = text_biases(body.logit_bias, lm.tokenizer.encode)
        else:
            options["logit_bias"] = biases(body.logit_bias)
    options |= {} if body.end else {"end": False}
    if body.unspool is None:
        return options
    extension = body.unspool.options()
    repeated = sorted({*extension} & {*options} - {"top", "explain", "penalize_prompt"})
    if repeated:
        name = repeated[0]
        raise bad_request(f"{name} is given twice, also under unspool", f"unspool.{name}")
    if "top" in extension:
        extension["top"] = max(extension["top"], options["top"])
    return options | extension


def check_one_grammar(options: dict[str, Any], because: str) -> None:
    """Reject a second grammar: `because` names what already constrains the text."""
    for name in _GRAMMARS:
        if options.get(name):
            raise bad_request(f"{name} cannot be combined with {because}")


def compile_schema(options: dict[str, Any], note: Callable[..., None]) -> None:
    """Replace `json_schema` among the options by a grammar; `note` gets what it cannot enforce."""
    if options.get("json_schema") is not None:
        check_one_grammar({**options, "json_schema": None}, "a JSON schema")
        spec = GrammarSpec.json_schema(options.pop("json_schema"))
        note(*spec.notes)
        options["grammar"] = spec


def check_stream_options(body: Any) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")


def check_choices(n: int, limit: int, name: str = "n") -> None:
    if n > limit:
        raise bad_request(f"{name} must be at most {limit} on this server, got {n}", name)


def prediction_drafter(lm: Session, text: str) -> Any:
    """Makes a drafter for each text, which proposes tokens of the expected answer."""
    ids = lm.tokenizer.encode(text)

    def drafter(request: Request) -> Drafter:
        return AdaptiveDrafter(PredictedText(ids, start=len(request.prompt)))

    return drafter


def finish_reason(reason: str, calls: Sequence[Any] = ()) -> str:
    """The finish reason in OpenAI's terms."""
    if calls and reason == "stop":
        return "tool_calls"
    return {"context": "length", "guard": "stop", "interrupted": "length"}.get(reason, reason)
