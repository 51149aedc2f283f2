"""What llama.cpp's `/completion` takes, in our words."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from unspool.serve.core.foreign import llama_defaults
from unspool.serve.core.schema import MAX_PROMPTS, SamplingRequest, ShortText
from unspool.serve.http.errors import bad_request

MAX_PROBABILITIES = 20
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Mixed = Annotated[list[TokenId | str], Field(min_length=1)]
_STAGES = {
    "penalties": ["repetition_penalty", "frequency_penalty", "presence_penalty"],
    "typ_p": ["typical_p"],
    "temperature": ["dynamic_temperature", "temperature"],
    "infill": [],
}


class CompletionRequest(SamplingRequest):
    """A text to be continued: words, token ids, or both in a row; a list of texts, each of them."""

    prompt: str | Annotated[list[TokenId | str | Mixed], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31, description="also n_predict")
    n_probs: int = Field(0, ge=0, le=MAX_PROBABILITIES, description="likeliest tokens to be told")
    post_sampling_probs: bool = Field(False, description="their chances in the draw itself")
    return_tokens: bool = False
    response_fields: list[ShortText] | None = Field(None, max_length=64)

    @property
    def prompts(self) -> list[str | list[int | str]]:
        """Every text: a list that holds an id is one text, others are as many as they hold."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        row = [part for part in self.prompt if not isinstance(part, list)]
        if len(row) == len(self.prompt) and any(isinstance(part, int) for part in row):
            return [row]
        if len(self.prompt) > MAX_PROMPTS:
            raise bad_request(f"prompt may hold at most {MAX_PROMPTS} texts", "prompt")
        return [[part] if isinstance(part, int) else part for part in self.prompt]

    @classmethod
    def _translated(cls, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        found = llama_defaults(given)
        if isinstance(found.get("logit_bias"), list):
            found["logit_bias"] = dict(map(_bias, found["logit_bias"]))
        if isinstance(found.get("samplers"), list):
            names = [str(name) for name in found.pop("samplers")]
            stages = [stage for name in names for stage in _STAGES.get(name, [name])]
            found["stages"] = ["logit_bias", *stages]  # which is always on there
        if found.get("grammar") == "":
            del found["grammar"]
        if "n_cmpl" in found:
            found["n"] = found.pop("n_cmpl")
        return super()._translated(found)


def _bias(pair: Any) -> tuple[str, float]:
    """`[token, amount]`, where false means never."""
    fits = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int)
    if not fits or not isinstance(pair[1], int | float):
        message = "logit_bias may hold [token id, amount]; /tokenize tells the ids of a text"
        raise bad_request(message, "logit_bias")
    return str(pair[0]), -100.0 if pair[1] is False else max(-100.0, min(100.0, float(pair[1])))
