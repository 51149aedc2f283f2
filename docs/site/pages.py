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
# Pages that come first in their folder, in this order; all others follow by title.
ORDER = {
    "tutorials": ["first-text", "look-inside", "look-inside-a-token", "steer", "train", "serve"],
    "how-to": ["install", "choose-a-model", "use-a-gpu"],
    "reference": ["python-api", "result-types", "options", "command-line", "http-api"],
    "explanation": ["how-it-works", "architecture", "determinism"],
}
# Search: a guide that does the task comes before the tables that mention its words.
BOOSTS = {"tutorials": 1.5, "how-to": 2.0, "explanation": 1.5, "reference": 0.5, "research": 0.4}
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
