"""What llama.cpp's `/completion` and `/infill` take, translated into our names."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt

from unspool.serve.core.foreign import llama_defaults
from unspool.serve.core.schema import MAX_PROMPTS, SamplingRequest, ShortText, Strict
from unspool.serve.http.errors import bad_request, unsupported
from unspool.text.chat.messages import ONLY_TEXT

MAX_PROBABILITIES = 1000
TokenId = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
Mixed = Annotated[list[TokenId | str], Field(min_length=1)]


class PromptObject(Strict):
    """A prompt beside its images, of which there may be none here."""

    prompt_string: str
    multimodal_data: Annotated[list[Any], Field(max_length=0)] | None = None


MixedPrompts = (
    str | PromptObject | Annotated[list[TokenId | str | Mixed | PromptObject], Field(min_length=1)]
)


def split_prompts(given: MixedPrompts, name: str) -> list[list[int | str]]:
    """Every text of a request as a row of words and ids.

    A list with a bare id in it is one text; any other list has one text per entry.
    """
    prompts = given if isinstance(given, list) else [given]
    flat = [part for part in prompts if isinstance(part, int | str)]
    if len(flat) == len(prompts) and any(isinstance(part, int) for part in flat):
        return [flat]
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"{name} may hold at most {MAX_PROMPTS} texts, got {len(prompts)}", name)
    return [_row(part) for part in prompts]


def _row(part: int | str | list[int | str] | PromptObject) -> list[int | str]:
    if isinstance(part, PromptObject):
        return [part.prompt_string]
    return part if isinstance(part, list) else [part]


class CompletionRequest(SamplingRequest):
    """A text to be continued: words, token ids, or both in a row; a list of texts, each of them."""

    prompt: MixedPrompts
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31, description="also n_predict")
    n_probs: int = Field(
        0, ge=0, le=MAX_PROBABILITIES, description="how many of the likeliest tokens are listed"
    )
    post_sampling_probs: bool = Field(False, description="probabilities after sampling stages")
    return_tokens: bool = False
    response_fields: list[ShortText] | None = Field(None, max_length=64)
    parse_special: StrictBool = Field(
        True, description="control tokens that the prompt spells are control; false: text"
    )

    @property
    def prompts(self) -> list[list[int | str]]:
        """Every text as a row of words and ids."""
        return split_prompts(self.prompt, "prompt")

    @classmethod
    def _translated(cls, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        given = dict(given)
        nested = given.pop("params", None)  # settings as /props shows them
        if isinstance(nested, dict):
            given = nested | given
            given = {name: value for name, value in given.items() if name not in _SLOT_FIELDS}
        found = llama_defaults(given)
        for name, aliases in _ALIASES.items():  # llama.cpp reads the first that is there
            values = [found.pop(each) for each in (name, *aliases) if each in found]
            if values:
                found[name] = values[0]
        if isinstance(found.get("logit_bias"), list | dict):
            found["logit_bias"] = read_logit_bias(found["logit_bias"])
        if isinstance(found.get("stop"), list):
            found["stop"] = [word for word in found["stop"] if word != ""]
        if found.get("image_data"):
            raise unsupported("image_data", ONLY_TEXT)
        if found.get("grammar") == "":
            del found["grammar"]
        return super()._translated(found)


_ALIASES = {
    "n_predict": ("max_completion_tokens", "max_tokens"),
    "n_probs": ("logprobs",),
    "n": ("n_cmpl",),
}
_SLOT_FIELDS = ("id", "id_task", "is_processing", "speculative")  # of a slot, beside its settings


def read_logit_bias(value: list[Any] | dict[str, Any]) -> list[tuple[int | str, float]]:
    """llama.cpp's forms of `logit_bias` as pairs of a token id or a text, and an amount.

    Its forms: `[[5, -1.0], [" the", false]]`, `[{"token": 5, "bias": -1.0}]` as in
    `generation_settings`, and `{"5": -1.0, " the": false}`. False and null forbid a token.
    """
    if isinstance(value, dict):
        named = [(int(key) if _is_id(key) else key, amount) for key, amount in value.items()]
        return [(token, _amount(token, amount)) for token, amount in named]
    pairs: list[tuple[int | str, float]] = []
    for entry in value:
        if isinstance(entry, dict) and {*entry} == {"token", "bias"}:
            entry = [entry["token"], entry["bias"]]
        if not (isinstance(entry, list | tuple) and len(entry) == 2):
            raise bad_request(
                f"logit_bias must hold [token, amount], got {entry!r:.60}", "logit_bias"
            )
        token, amount = entry
        if isinstance(token, bool) or not isinstance(token, int | str) or token == -1:
            message = f"logit_bias must name tokens by id or text, got {token!r:.60}"
            raise bad_request(message, "logit_bias")
        pairs.append((token, _amount(token, amount)))
    return pairs


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 10


def _amount(token: int | str, amount: Any) -> float:
    if amount is False or amount is None:
        return -math.inf
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        message = f"logit_bias of {token!r:.40} must be a number or false, got {amount!r:.40}"
        raise bad_request(message, "logit_bias")
    return float(amount)
