"""Which pages the site has besides those in `docs/`, and in which order. Imports no MkDocs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = {
    "tutorials": "Tutorials",
    "how-to": "How-to guides",
    "reference": "Reference",
    "explanation": "Explanation",
    "research": "Research",
}
INTRODUCTIONS = {
    "tutorials": "Lessons, step by step: after each of them you have something that works.",
    "how-to": "One task a page: the shortest way to do it, with code that runs.",
    "reference": "Every option, field, endpoint, format, environment variable and error.",
    "explanation": "How Unspool works, and why.",
    "research": "Lab notebooks: measurements and experiments with date, machine, commit and "
    "command, negative results included.",
}
# The order of the pages, by heading in the navigation ("": none). A page that is not listed follows
# the others by title, below `OTHERS` if the folder has headings.
ORDER: dict[str, dict[str, list[str]]] = {
    "tutorials": {"": ["first-text", "look-inside", "steer", "train", "serve", "notebooks"]},
    "how-to": {
        "Set up": ["install", "check-your-installation", "use-a-gpu"],
        "Models": [
            "choose-a-model", "download-and-manage-models", "use-models-of-other-programs",
            "run-quantized-models", "use-lora-adapters",
            "run-a-model-on-several-gpus",
        ],
        "Generate text": [
            "sampling-settings", "hold-a-conversation", "reasoning-and-tools", "structured-output",
            "stream-and-async", "batch-many-prompts", "samples-and-beam", "search-with-a-budget",
            "speculative-decoding", "guards", "texts-longer-than-the-context",
            "generate-with-diffusion", "infill", "edit-a-text",
        ],
        "Inspect and change": [
            "get-logprobs", "hidden-states", "steer", "rewind-and-fork", "save-and-replay",
            "keep-your-texts", "tokenize-text", "measure-costs", "use-the-page",
            "run-in-a-browser-tab", "use-in-a-notebook",
        ],
        "Serve": [
            "use-openai-clients", "use-ollama-and-anthropic-clients", "use-llama-cpp-clients",
            "use-sillytavern-and-mikupad", "use-from-mcp-clients",
            "tools-and-structured-output-over-http", "logprobs-over-http", "edit-text-over-http",
            "embeddings", "rerank",
            "reproduce-a-response", "load-and-unload-models", "batch-jobs", "secure-a-server",
            "monitor", "replicas", "deploy",
        ],
        "Train": [
            "fine-tune-with-lora", "preference-and-rl", "pretrain", "prepare-data",
            "train-a-tokenizer", "watch-a-training-run", "train-on-several-machines",
            "train-with-trl", "train-a-masked-twin", "evaluate-a-model", "evaluate-with-lm-eval",
            "fit-a-scaling-law", "export-to-gguf",
        ],
    },
    "reference": {"": ["python-api", "result-types", "options", "command-line", "http-api"]},
    "explanation": {"": ["how-it-works", "architecture", "determinism", "memory"]},
}  # fmt: skip
OTHERS = "Other tasks"
# Search: a guide that does the task comes before the tables that mention its words.
BOOSTS = {"tutorials": 1.5, "how-to": 2.0, "explanation": 1.5, "reference": 0.5, "research": 0.4}
LOW_BOOSTS = {"index.md": 0.2, "error-messages.md": 0.05}
GENERATED: dict[str, tuple[str, str]] = {  # page: module and function
    "reference/python-api.md": ("python_api", "api_page"),
    "reference/result-types.md": ("python_api", "results_page"),
    "reference/options.md": ("options_page", "options_page"),
    "reference/command-line.md": ("command_line", "command_page"),
    "reference/http-api.md": ("http_api", "http_page"),
    "reference/environment-variables.md": ("environment", "environment_page"),
    "reference/errors.md": ("error_pages", "errors_page"),
    "reference/error-messages.md": ("error_pages", "messages_page"),
}


def generate(path: str) -> str:
    """Return a page of the reference, generated from the code."""
    for folder in (str(Path(__file__).parent), str(ROOT / "src")):  # the code of this tree
        if folder not in sys.path:
            sys.path.insert(0, folder)
    module, function = GENERATED[path]
    make: Callable[[], str] = getattr(importlib.import_module(module), function)
    return make()
