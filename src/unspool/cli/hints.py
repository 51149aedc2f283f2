"""Hints for mistyped commands, for commands and options of other programs, and for model names.

Without a hint `unspool caht` would be answered as a prompt. Any other single word is a prompt.
`unspool run WORD` makes a prompt of every word, and `echo WORD | unspool` also of a model name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from unspool.features import FEATURES

_QUOTED_PROMPT = '"your prompt"'
_PROMPT = f"unspool {_QUOTED_PROMPT}"

# Commands of other programs, and the command here.
ALIASES = {
    "api": "unspool serve",
    "ask": _PROMPT,
    "cli": "unspool chat",
    "complete": _PROMPT,
    "check": "unspool doctor",
    "delete": "unspool models rm MODEL",
    "diagnose": "unspool doctor",
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
# Commands of other programs that do not exist here, and what to do instead.
MISSING = {
    "bench": "every answer ends with its speed",
    "benchmark": "every answer ends with its speed",
    "convert": "models run without conversion: -m MODEL",
    "cp": "a model is named by its path: -m MODEL",
    "create": "give settings as options, such as --system",
    "embed": "unspool serve has /v1/embeddings",
    "login": "there are no accounts",
    "push": "nothing is uploaded",
    "quantize": "--quantize 4 quantizes the weights while loading",
    "stop": "Ctrl-C ends a command and unloads its model",
}
# Commands of a group, which people may type without the group.
GROUPED = {
    **{
        name: f"unspool {command.name} {name}"
        for feature in FEATURES
        for command in feature.commands
        for name in command.subcommands
    },
    "catalog": "unspool models catalogue",
    "catalogue": "unspool models catalogue",
    "plan": "unspool models plan MODEL",
}
# Those that may well be a prompt of one word.
_ORDINARY_WORDS = ("new", "twin", "merge", "task", "data", "judge", "plan")

# Options of llama.cpp, Ollama and transformers.
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

# Such as model.gguf, hf.co/org/name, org/name-1B, llama3.2:1b, qwen3-0.6b.
_MODEL = re.compile(
    r"\S+\.gguf|(hf\.co|huggingface\.co)/\S+|[\w-]+/[\w.-]*\d[\w.-]*(:\w+)?|[a-z][\w.-]*\d[\w.-]*:[\w.-]+|"
    r"(llama|qwen|gemma|mistral|mixtral|phi|smollm|deepseek|olmo)[\w.-]*\d[\w.-]*",
    re.IGNORECASE,
)


def command_hint(word: str, commands: Iterable[str], arguments: Sequence[str] = ()) -> str | None:
    """Error message for a first word that looks like a command; None if it is a prompt.

    A subcommand that is also an ordinary word (`data`) counts only if `arguments` follow it.
    """
    advice = _advice(word, commands, has_arguments=bool(arguments))
    if advice is None:
        return None
    return f"there is no command {word!r}; {advice} As a prompt: unspool run {word}"


def unknown_command(word: str, commands: Iterable[str]) -> str:
    """Error message for a word that must be a command."""
    advice = _advice(word, commands, has_arguments=True)
    return f"there is no command {word!r}; {advice or 'unspool --help lists the commands'}"


def _advice(word: str, commands: Iterable[str], *, has_arguments: bool) -> str | None:
    name = word.lower()
    if not name.replace("-", "").isalpha() or name.startswith("-"):
        return None
    if name in ALIASES:
        return f"did you mean {ALIASES[name]}?"
    if name in GROUPED and (has_arguments or name not in _ORDINARY_WORDS):
        return f"did you mean {GROUPED[name]}?"
    if name in MISSING:
        return f"{MISSING[name]}."
    near = difflib.get_close_matches(name, [*commands, "help"], n=1, cutoff=0.75)
    return f"did you mean unspool {near[0]}?" if near else None


def model_hint(prompt: str) -> str | None:
    """Error message for a prompt that is a model name, as in `run llama3.2` of other programs."""
    if not _MODEL.fullmatch(prompt):
        return None
    return (
        f"{prompt!r} looks like a model; name it with -m: unspool -m {prompt} {_QUOTED_PROMPT}, or "
        f"unspool chat -m {prompt}. As a prompt: echo {prompt} | unspool"
    )


def extra_words(first: str, others: str) -> str:
    """Error message for words after the prompt: missing quotes, or `run MODEL PROMPT`."""
    if _MODEL.fullmatch(first):
        return f'name the model with -m: unspool -m {first} "{others}"'
    return f'the text has several words; put it in quotes: "{first} {others}"'
