"""Request schemas of llama.cpp's `/completion` and `/infill`, translated to Unspool's names."""

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
    """A prompt with images, which must be empty."""

    prompt_string: str
    multimodal_data: Annotated[list[Any], Field(max_length=0)] | None = None


MixedPrompts = (
    str | PromptObject | Annotated[list[TokenId | str | Mixed | PromptObject], Field(min_length=1)]
)


def split_prompts(value: MixedPrompts, name: str) -> list[list[int | str]]:
    """Each prompt of a request as a list of texts and ids.

    A list with a bare id is one prompt; any other list has one prompt per entry.
    """
    prompts = value if isinstance(value, list) else [value]
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


class LlamaCompletionRequest(SamplingRequest):
    """A prompt to complete: text, token ids, or a mix; or a list of prompts."""

    prompt: MixedPrompts
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31, description="also n_predict")
    n_probs: int = Field(
        0, ge=0, le=MAX_PROBABILITIES, description="how many of the most likely tokens to list"
    )
    post_sampling_probs: bool = Field(False, description="probabilities after the sampling stages")
    return_tokens: bool = False
    response_fields: list[ShortText] | None = Field(None, max_length=64)
    parse_special: StrictBool = Field(
        True, description="parse control tokens in the prompt; false: they are text"
    )

    @property
    def prompts(self) -> list[list[int | str]]:
        """Each prompt as a list of texts and ids."""
        return split_prompts(self.prompt, "prompt")

    @classmethod
    def _translated(cls, params: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        params = dict(params)
        nested = params.pop("params", None)  # settings as /props lists them
        if isinstance(nested, dict):
            params = nested | params
            params = {name: value for name, value in params.items() if name not in _SLOT_FIELDS}
        translated = llama_defaults(params)
        for name, aliases in _ALIASES.items():  # llama.cpp reads the first one present
            values = [translated.pop(alias) for alias in (name, *aliases) if alias in translated]
            if values:
                translated[name] = values[0]
        if isinstance(translated.get("logit_bias"), list | dict):
            translated["logit_bias"] = read_logit_bias(translated["logit_bias"])
        if isinstance(translated.get("stop"), list):
            translated["stop"] = [word for word in translated["stop"] if word != ""]
        if translated.get("image_data"):
            raise unsupported("image_data", ONLY_TEXT)
        if translated.get("grammar") == "":
            del translated["grammar"]
        return super()._translated(translated)


_ALIASES = {
    "n_predict": ("max_completion_tokens", "max_tokens"),
    "n_probs": ("logprobs",),
    "n": ("n_cmpl",),
}
_SLOT_FIELDS = ("id", "id_task", "is_processing", "speculative")  # of a slot, not settings


def read_logit_bias(value: list[Any] | dict[str, Any]) -> list[tuple[int | str, float]]:
    """Convert llama.cpp's forms of `logit_bias` to pairs of a token id or text, and an amount.

    Forms: `[[5, -1.0], [" the", false]]`, `[{"token": 5, "bias": -1.0}]` as in
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
