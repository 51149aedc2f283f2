"""Translate the parameters of an API to the options of `LanguageModel.stream`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unspool.decoding.controller import AdaptiveDrafter
from unspool.decoding.speculative import PredictedText
from unspool.engine.request import Drafter, Request
from unspool.sampling import GrammarSpec
from unspool.serve.core.schema import Constraints, SamplingRequest, biases, stops, text_biases
from unspool.serve.http.errors import bad_request
from unspool.session import Session

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
