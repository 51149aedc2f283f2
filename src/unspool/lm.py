"""The Python face: load a model, let it write, look at every step.

import unspool
lm = unspool.load()                                   # the default model, a path or a repo id
print(lm.generate("Once upon a time", temperature=0.7, seed=7))
for step in lm.stream("Once upon a time"):
    print(step.text, end="", flush=True)
print(lm.chat("Why do leaves change color in fall?"))
print(lm.score("The cat sat on the mat").perplexity)
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.engine.plain import Limits, RunningText, check_fits, write
from unspool.engine.steps import Candidate, Generation, Score, Step, TokenScore
from unspool.errors import ModelFileError, SettingsError, UnspoolError
from unspool.model.checkpoint import (
    Checkpoint,
    GGUFCheckpoint,
    load_transformer,
    open_checkpoint,
    save_checkpoint,
)
from unspool.model.config import ModelConfig
from unspool.model.hub import find_model
from unspool.sampling import SamplingSettings
from unspool.sampling import score as score_logits
from unspool.text.chat import ChatPrompt, ChatTemplate
from unspool.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from unspool.model.transformer import Transformer

Prompt = str | Sequence[int]
Messages = str | Sequence[Mapping[str, Any]]

DTYPES = ("float32", "bfloat16", "float16")
_SCORED_AT_ONCE = 256  # rows of logits: bounds the memory that scoring a long text needs


def load(
    model: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    context: int | None = None,
    offline: bool = False,
    progress: bool = True,
) -> LanguageModel:
    """A model, ready to write.

    `model` is a path (a folder with safetensors, or a GGUF file), a repo id (`org/name`), or
    nothing for the default model. `dtype` is float32, bfloat16 or float16; `auto` means float32
    on a CPU and bfloat16 on a GPU. `context` limits, or extends, how many tokens a text may have.
    """
    device, dtype = _choose(device, dtype)
    checkpoint = open_checkpoint(find_model(model, offline=offline, progress=progress))
    tokenizer = open_tokenizer(checkpoint)
    if context is not None and (not isinstance(context, int) or context < 1):
        raise SettingsError(f"context is {context!r}; it must be a number of tokens, at least 1")
    if context is not None and checkpoint.config.positions == "learned":
        context = min(context, checkpoint.config.context)  # there is no table for more
    transformer = load_transformer(checkpoint, dtype=dtype, device=device)
    return LanguageModel(transformer, tokenizer, path=checkpoint.path, context=context)


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The vocabulary that came with a checkpoint; None if there is none (token ids still work)."""
    if isinstance(checkpoint, GGUFCheckpoint):
        if "tokenizer.ggml.model" not in checkpoint.file.metadata:
            return None
        return Tokenizer.from_gguf(checkpoint.file.metadata)
    if not (checkpoint.path / "tokenizer.json").exists():
        return None
    return Tokenizer.from_file(checkpoint.path)


def _choose(device: str, dtype: str) -> tuple[str, str]:
    if dtype not in ("auto", *DTYPES):
        raise SettingsError(f"dtype is {dtype!r}; it may be auto, {', '.join(DTYPES)}")
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"the device {device!r} cannot be used here: {reason}") from error
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return device, dtype


class LanguageModel:
    """A model and its vocabulary; made by `load`."""

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer | None,
        *,
        path: Path | None = None,
        context: int | None = None,
    ) -> None:
        self.transformer = transformer
        self.path = path
        self.context = context or transformer.config.context
        self._tokenizer = tokenizer
        known = tokenizer.end_ids if tokenizer else frozenset()
        self.end_ids: frozenset[int] = known | frozenset(transformer.config.end_ids)
        self._template: ChatTemplate | None = None

    def __repr__(self) -> str:
        name = self.path.name if self.path else self.config.family
        return f"<LanguageModel {name}, context {self.context}>"

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ModelFileError(
                f"{self.path}: has no vocabulary (tokenizer.json); give prompts as token ids, "
                "or put the model's tokenizer.json beside its weights"
            )
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate(self.tokenizer.chat_template, self.tokenizer)
        return self._template

    @property
    def is_instruct(self) -> bool:
        """Whether the model came with a chat template."""
        return self._tokenizer is not None and self._tokenizer.chat_template is not None

    # -- writing ----------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Continue a prompt; the options are those of `stream`."""
        generation, steps = self.begin(prompt, **options)
        generation.steps.extend(steps)
        return generation

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Step]:
        """Continue a prompt, step by step.

        prompt       text, or token ids.
        max_tokens   how many tokens at the most.
        stop         strings that end the text, and are not part of it.
        seed         same seed, same text; without one it is different each time.
        sample       the number of the sample, when one seed is to give several texts.
        top          how many candidates each step tells (default 5).
        explain      whether each step tells what the sampling stages did (default True).
        end          False: go on when the model writes an end token.
        ...          temperature, top_k, top_p and the rest of `SamplingSettings`.
        """
        _, steps = self.begin(prompt, **options)
        return steps

    def chat(self, messages: Messages, **options: Any) -> Generation:
        """Answer a conversation (or a single message) by the model's chat template.

        A conversation whose last message is the assistant's is continued where it stops.
        Options are those of `stream`, and `tools`.
        """
        prompt = self.chat_prompt(messages, tools=options.pop("tools", None))
        stops = tuple(_strings(options.pop("stop", ()))) + self.chat_template.stops
        return self.generate(prompt.ids, stop=stops, **options)

    def chat_prompt(self, messages: Messages, **options: Any) -> ChatPrompt:
        """A conversation as token ids, ready for `generate` and `stream`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        unfinished = bool(messages) and messages[-1].get("role") == "assistant"
        return self.chat_template.encode(
            messages,
            continue_final_message=options.pop("continue_final_message", unfinished),
            **options,
        )

    def begin(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        sample: int = 0,
        top: int = 5,
        explain: bool = True,
        end: bool = True,
        text: RunningText | None = None,
        **sampling: Any,
    ) -> tuple[Generation, Iterator[Step]]:
        """A generation without steps yet, and the steps to come; options as in `stream`.

        `text` is a running text of one's own, when what it has read is to be used again.
        """
        for name, value in (("max_tokens", max_tokens), ("top", top), ("sample", sample)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise SettingsError(f"{name} is {value!r}; it may be a whole number from 0 up")
        ids = self.prompt_ids(prompt)
        settings = SamplingSettings.from_options(
            seed=secrets.randbits(32) if seed is None else seed, **sampling
        )
        limits = Limits(
            max_tokens=max_tokens,
            context=self.context,
            end_ids=self.end_ids if end else frozenset(),
            stop=tuple(_strings(stop)),
            sample=sample,
            top=top,
            explain=explain,
        )
        from unspool.backends.torch.plain import PlainText

        generation = Generation(tuple(ids), settings)
        generation.empty_reason = "length" if max_tokens == 0 else "context"
        if text is None:
            text = PlainText(self.transformer, min(self.context, len(ids) + max_tokens))
        return generation, write(text, ids, settings, limits, self._token_bytes)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """A prompt as token ids, checked: not empty, in the vocabulary, within the context."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_prompt(prompt)
        else:
            ids = [int(token) for token in prompt]
            for token in ids:
                if not 0 <= token < self.config.vocab_size:
                    raise UnspoolError(
                        f"token {token} is not in the vocabulary, which goes from 0 to "
                        f"{self.config.vocab_size - 1}"
                    )
        if not ids:
            raise UnspoolError("the prompt is empty; give the model at least one token to go on")
        check_fits(ids, self.context)
        return ids

    def _token_bytes(self, token: int) -> bytes:
        """A token's bytes in a text; control tokens and numbers without a piece have none."""
        vocabulary = self._tokenizer
        if vocabulary is None or token >= len(vocabulary) or token in vocabulary.special_ids:
            return b""
        return vocabulary.token_bytes(token)

    # -- judging ----------------------------------------------------------------------------

    def score(self, text: Prompt, *, top: int = 0) -> Score:
        """Log-probability of each token of a text given those before it.

        With `top`, also the likeliest candidates at each position.
        """
        from unspool.backends.torch.plain import PlainText

        ids = self.prompt_ids(text)
        # A start token that the model wants before every text is read but not judged.
        lead = int(
            isinstance(text, str) and ids[0] == self.tokenizer.bos_id and self.tokenizer.add_bos
        )
        reader = PlainText(self.transformer, len(ids))
        positions: list[TokenScore] = []
        if not lead:
            positions.append(TokenScore(ids[0], self._readable(ids[0]), None, None, None))
        for start in range(0, len(ids) - 1, _SCORED_AT_ONCE):
            read = ids[start : min(start + _SCORED_AT_ONCE, len(ids) - 1)]
            targets = ids[start + 1 : start + 1 + len(read)]
            found = score_logits(reader.append_all(read), targets, top)
            for row, token in enumerate(targets):
                best = zip(found.top_tokens[row], found.top_logprobs[row], strict=True)
                positions.append(
                    TokenScore(
                        token=token,
                        text=self._readable(token),
                        logprob=float(found.logprobs[row]),
                        rank=int(found.ranks[row]),
                        entropy=float(found.entropies[row]),
                        candidates=tuple(self._judged(int(t), float(p)) for t, p in best),
                    )
                )
        return Score(positions)

    def _judged(self, token: int, logprob: float) -> Candidate:
        return Candidate(token, self._readable(token), logprob, math.exp(logprob))

    def _readable(self, token: int) -> str:
        if self._tokenizer is None or token >= len(self._tokenizer):
            return ""
        return self._tokenizer.token_text(token)

    def save(self, folder: str | Path) -> None:
        """Write a folder that transformers (and `load`) can read."""
        save_checkpoint(self.transformer, folder)
        if self._tokenizer is not None:
            self._tokenizer.save(folder)


def _strings(stop: str | Sequence[str]) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else list(stop)
