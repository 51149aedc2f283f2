"""Words that were meant otherwise: a command mistyped or known from another program, a model.

`unspool caht` would be answered as a prompt, and nobody would know why. Any other single word is a
prompt; `unspool run caht` makes one of every word, and `echo WORD | unspool` of a model's name too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_YOURS = '"your prompt"'
_PROMPT = f"unspool {_YOURS}"

# What other programs call what this one has.
ELSEWHERE = {
    "api": "unspool serve",
    "ask": _PROMPT,
    "cli": "unspool chat",
    "complete": _PROMPT,
    "completion": _PROMPT,
    "delete": "unspool models rm MODEL",
    "download": "unspool models pull MODEL",
    "finetune": "unspool train tune",
    "fine-tune": "unspool train tune",
    "generate": _PROMPT,
    "gui": "unspool page",
    "infill": 'unspool fill "The ___ sat on the mat"',
    "info": "unspool models info MODEL",
    "install": "unspool models pull MODEL",
    "interactive": "unspool chat",
    "learn": "unspool train",
    "perplexity": 'unspool score "a text"',
    "pretrain": "unspool train",
    "remove": "unspool models rm MODEL",
    "repl": "unspool chat",
    "revise": "unspool edit FILE",
    "start": "unspool serve",
    "talk": "unspool chat",
    "ui": "unspool page",
    "version": "unspool --version",
    "web": "unspool page",
    "webui": "unspool page",
}
# What other programs have and this one has not, and what there is instead.
NOT_HERE = {
    "bench": "every answer ends with its speed",
    "benchmark": "every answer ends with its speed",
    "convert": "models run as they are: -m MODEL",
    "cp": "a model is named by its path: -m MODEL",
    "create": "give settings as options, such as --system",
    "embed": "unspool serve has /v1/embeddings",
    "login": "there are no accounts",
    "push": "nothing is sent anywhere",
    "quantize": "--quantize 4 packs the weights while loading",
    "stop": "Ctrl-C ends a command, and its model is gone with it",
}
# Such as model.gguf, hf.co/org/name, org/name-1B, llama3.2:1b, qwen3-0.6b.
_MODEL = re.compile(
    r"\S+\.gguf|(hf\.co|huggingface\.co)/\S+|[\w-]+/[\w.-]*\d[\w.-]*(:\w+)?|[a-z][\w.-]*\d[\w.-]*:[\w.-]+|"
    r"(llama|qwen|gemma|mistral|mixtral|phi|smollm|deepseek|olmo)[\w.-]*\d[\w.-]*",
    re.IGNORECASE,
)

# Options as llama.cpp, Ollama and transformers name them.
OPTIONS = {
    "--ctx-size": "--context",
    "--max-new-tokens": "--max-tokens (-n)",
    "--n-predict": "--max-tokens (-n)",
    "--num-ctx": "--context",
    "--num-predict": "--max-tokens (-n)",
    "--prompt": "the prompt without an option",
    "--repeat-penalty": "--repetition-penalty",
    "--system-prompt": "--system",
    "--temp": "--temperature (-t)",
    "-c": "--context",
    "-ngl": "--device cuda",
    "-p": "the prompt without an option",
}


# Commands of a group, by how people call them without it.
GROUPED = {
    **{name: f"unspool train {name}" for name in
       ("new", "tune", "dpo", "grpo", "twin", "merge", "task", "runs", "data", "judge", "export",
        "scaling", "tokenizer")},
    "catalog": "unspool models catalogue",
    "catalogue": "unspool models catalogue",
    "plan": "unspool models plan MODEL",
}  # fmt: skip


def hint(word: str, commands: Iterable[str], behind: Sequence[str] = ()) -> str | None:
    """What to say of a first word that looks like a command but is none; None: it is a prompt.

    `behind` are the arguments after it: a command of a group that is an ordinary word too (`data`)
    is taken for one only if something follows it.
    """
    advice = _advice(word, commands, has_arguments=bool(behind))
    if advice is None:
        return None
    return f"there is no command {word!r}; {advice} As a prompt: unspool run {word}"


def unknown_command(word: str, commands: Iterable[str]) -> str:
    """What to say of a word that must be a command and is none."""
    advice = _advice(word, commands, has_arguments=True)
    return f"there is no command {word!r}; {advice or 'unspool --help lists the commands'}"


def _advice(word: str, commands: Iterable[str], *, has_arguments: bool) -> str | None:
    name = word.lower()
    if not name.replace("-", "").isalpha() or name.startswith("-"):
        return None
    if name in ELSEWHERE:
        return f"did you mean {ELSEWHERE[name]}?"
    if name in GROUPED and (has_arguments or name not in _ORDINARY_WORDS):
        return f"did you mean {GROUPED[name]}?"
    if name in NOT_HERE:
        return f"{NOT_HERE[name]}."
    near = difflib.get_close_matches(name, [*commands, "help"], n=1, cutoff=0.75)
    return f"did you mean unspool {near[0]}?" if near else None


# Of `GROUPED`, what may well be a prompt of one word.
_ORDINARY_WORDS = ("new", "twin", "merge", "task", "data", "judge", "plan")


def model_hint(prompt: str) -> str | None:
    """What to say of a prompt that is a model's name, as in `run llama3.2` elsewhere."""
    if not _MODEL.fullmatch(prompt):
        return None
    return (
        f"{prompt!r} looks like a model, which -m names: unspool -m {prompt} {_YOURS}, or "
        f"unspool chat -m {prompt}. As a prompt: echo {prompt} | unspool"
    )


def extra_words(first: str, rest: str) -> str:
    """What to say of words behind the prompt: quotes were forgotten, or `run MODEL PROMPT`."""
    if _MODEL.fullmatch(first):
        return f'a model is named by -m: unspool -m {first} "{rest}"'
    return f'the text has several words; put it into quotes: "{first} {rest}"'
