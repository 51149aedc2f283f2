"""The options of a generation as Markdown, from `unspool.Options`."""

from __future__ import annotations

import ast
import re
from typing import get_type_hints

from docstrings import class_node, code, escape, table

from unspool.engine.request import Options, SamplingOptions

# The order of the headings; an option in no group is a test's failure.
GROUPS = {
    "Length and end": ["max_tokens", "stop", "end", "endless"],
    "Randomness": ["seed", "sample", "temperature", "dynatemp_range", "dynatemp_exponent"],
    "Which tokens may be sampled": [
        "top_k", "top_p", "min_p", "typical_p", "eta", "top_n_sigma", "xtc_probability",
        "xtc_threshold", "mirostat_tau", "mirostat_eta", "logit_bias",
    ],
    "Repetition": [
        "repetition_penalty", "frequency_penalty", "presence_penalty", "penalty_window",
        "penalize_prompt", "no_repeat_ngram", "dry_multiplier", "dry_base", "dry_allowed_length",
        "dry_window", "dry_breakers", "guard",
    ],
    "Structured output": ["json", "json_schema", "regex", "choice", "grammar"],
    "Reasoning": ["thoughts", "think_budget"],
    "Logprobs and what is recorded": ["top", "explain"],
    "Inside the model": ["steer", "interventions"],
    "Speed and scheduling": ["speculate", "cache", "priority", "adapter"],
    "Order of the sampling stages": ["stages"],
}  # fmt: skip


def option_types() -> dict[str, str]:
    """Return the type of each option as it is written in the source."""
    types = {}
    for kind in (SamplingOptions, Options):
        for item in class_node(kind)[0].body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.annotation, ast.Subscript):
                written = item.annotation.slice
                first = written.elts[0] if isinstance(written, ast.Tuple) else written
                text = re.sub(r"\b_(Flag|Int|Float)\b", r"\1", ast.unparse(first))
                for name, plain in (("Flag", "bool"), ("Int", "int"), ("Float", "float")):
                    text = re.sub(rf"\b{name}\b", plain, text)
                types[ast.unparse(item.target)] = text.removesuffix(" | None")
    return types


def option_help() -> dict[str, tuple[str, str]]:
    """Return what each option does, and its default."""
    hints = get_type_hints(Options, include_extras=True)
    helps = {}
    for name, hint in hints.items():
        text = hint.__metadata__[0]
        match = re.search(r" \(([^()]+)\)$", text)
        default = match[1] if match else ""
        helps[name] = (text[: match.start()] if match else text, default)
    return helps


def options_page() -> str:
    """Return the page with every option."""
    types, helps = option_types(), option_help()
    parts = [
        "# Generation options reference",
        "This page lists every generation option: sampling parameters such as temperature, top_p "
        "and min_p, stop strings, seed, logprobs, structured output and speculative decoding. "
        "They are keyword arguments of `generate`, `stream`, `chat` and the other methods of "
        "[`LanguageModel`](python-api.md#languagemodel) in Python, options of "
        "[the command line](command-line.md) with dashes (`--max-tokens`), and fields of "
        "[the HTTP API](http-api.md). It is generated from `unspool.Options`.",
        "An option that is left out, or `None`, has its default.",
    ]
    for heading, names in GROUPS.items():
        rows = []
        for name in names:
            text, default = helps[name]
            text = re.sub(r"^\.\.\. ", "constrain the text ", text)
            text = escape(text[0].upper() + text[1:])
            rows.append([f'<a id="{name}"></a>`{name}`', code(types[name]), escape(default), text])
        parts += [f"## {heading}", table(["Option", "Type", "Default", "What it does"], rows)]
    return "\n\n".join(parts) + "\n"
