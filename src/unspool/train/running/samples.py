"""Texts that the model writes while it learns, by the same engine that writes for everybody."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.backends.torch.loaded import TorchModel
from unspool.language_model import LanguageModel
from unspool.model.transformer import Transformer
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.shards import Packed

_MEMORY = 256 << 20  # bytes for keys and values, which a few hundred tokens do not fill


class Samples:
    """The same prompts and seeds at every step, so that only the model makes the difference."""

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[str], length: int = 80) -> None:
        self.tokenizer, self.prompts, self.length = tokenizer, prompts, length

    def __call__(self, model: Transformer) -> list[tuple[str, int, str]]:
        """Prompt, seed and text of each."""
        lm = LanguageModel(TorchModel(model), self.tokenizer, memory=_MEMORY)
        try:
            return [
                (prompt, seed, self._write(lm, prompt, seed))
                for seed, prompt in enumerate(self.prompts)
            ]
        finally:
            lm.close()

    def _write(self, lm: LanguageModel, prompt: str, seed: int) -> str:
        room = lm.context - len(self.tokenizer.encode_prompt(prompt)) - 1
        longest = max(1, min(self.length, room))
        return lm.generate(prompt, max_tokens=longest, temperature=0.8, top_p=0.95, seed=seed).text


def first_words(packed: Packed, tokenizer: Tokenizer, tokens: int = 8) -> str:
    """How a held-out document begins: a prompt in the manner of the text."""
    for begin, end in zip(packed.borders[:-1].tolist(), packed.borders[1:].tolist(), strict=True):
        ids = packed.ids[begin : min(end, begin + tokens)].tolist()
        line = (tokenizer.decode(ids, specials=False).strip().splitlines() or [""])[0]
        whole, _, _ = line.rpartition(" ")  # the last word may be cut
        if whole and "�" not in whole:
            return whole
    return "The"
