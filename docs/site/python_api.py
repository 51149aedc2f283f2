"""The Python API as Markdown: every public name with its docstring, and the types of results."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import docstrings
from docstrings import code, escape, markdown, summary, table

import unspool

# Classes that public methods return or take, and that are reached by no name of the package.
RESULT_TYPES = {
    "Several texts": [
        "unspool.decoding.branches.Ranking",
        "unspool.decoding.search.samples.Vote",
        "unspool.decoding.search.tree.SearchTree",
        "unspool.decoding.search.futures.Futures",
        "unspool.decoding.search.futures.FutureNode",
        "unspool.decoding.search.tree.Thought",
        "unspool.decoding.search.think.ThoughtStream",
    ],
    "Steps and their parts": [
        "unspool.engine.results.StepStream",
        "unspool.engine.results.Candidate",
        "unspool.sampling.chain.StageReport",
        "unspool.sampling.chain.Draw",
        "unspool.engine.results.TokenScore",
        "unspool.engine.results.Usage",
    ],
    "KV cache": [
        "unspool.engine.tree.Branch",
    ],
    "Infill and edit": [
        "unspool.decoding.infill.result.Gap",
        "unspool.decoding.infill.result.Filling",
        "unspool.decoding.edit.edit.Edit",
    ],
    "Diffusion": [
        "unspool.decoding.diffusion.result.Diffusion",
        "unspool.decoding.diffusion.result.Diffusions",
        "unspool.decoding.diffusion.diffuse.DiffusionStream",
        "unspool.engine.canvas.Canvas",
    ],
    "Inspection": [
        "unspool.lens.activations.Activations",
        "unspool.lens.activation_cache.ActivationCache",
        "unspool.lens.activation_files.SavedActivations",
        "unspool.lens.logit_lens.LogitLens",
        "unspool.lens.attribution.Attribution",
        "unspool.lens.embeddings.Neighbour",
        "unspool.lens.steering.SteeringVector",
        "unspool.lens.patching.Sweep",
        "unspool.lens.sae.SparseAutoencoder",
        "unspool.lens.sae.TokenFeatures",
        "unspool.lens.sae.ActiveFeature",
        "unspool.lens.sae.FeatureExample",
        "unspool.lens.affine_lens.AffineLens",
        "unspool.lens.gradients.TokenAttribution",
        "unspool.lens.gradients.TokenValue",
        "unspool.lens.trace.Trace",
        "unspool.lens.replay.Replay",
    ],
    "Chat": [
        "unspool.text.chat.template.ChatTemplate",
        "unspool.text.chat.template.ChatPrompt",
    ],
}
_API, _RESULTS = "python-api.md", "result-types.md"


def public_classes() -> list[type]:
    """Return the classes of `unspool.__all__`, errors and options excluded: they have pages."""
    values = [getattr(unspool, name) for name in unspool.__all__]
    return [
        value
        for value in values
        if inspect.isclass(value)
        and not issubclass(value, Exception)
        and value is not unspool.Options
    ]


def public_functions() -> list[Any]:
    """Return the functions of `unspool.__all__`."""
    values = [getattr(unspool, name) for name in unspool.__all__]
    return [value for value in values if inspect.isfunction(value)]


def result_types() -> dict[str, list[type]]:
    """Return the classes of results, by heading."""
    groups = {}
    for heading, names in RESULT_TYPES.items():
        paths = [name.rpartition(".") for name in names]
        groups[heading] = [getattr(import_module(module), name) for module, _, name in paths]
    return groups


def _places() -> dict[str, str]:
    """Return where each documented class is: page and anchor."""
    places = {kind.__name__: f"{_API}#{kind.__name__.lower()}" for kind in public_classes()}
    for kinds in result_types().values():
        places |= {kind.__name__: f"{_RESULTS}#{kind.__name__.lower()}" for kind in kinds}
    return places


def _returned(returns: str, page: str) -> str:
    """Return the line that links the classes of a return annotation."""
    names = [name for name in dict.fromkeys(re.findall(r"\w+", returns)) if name in _places()]
    links = [f"[{name}]({_places()[name].removeprefix(page)})" for name in names]
    return f"Returns {' or '.join(links)}." if links else ""


def _callable(method: docstrings.Method, page: str, level: int, owner: str = "") -> list[str]:
    anchor = f"{owner}.{method.name}".strip(".").lower()
    parts = [
        f"{'#' * level} `{method.name}` {{ #{anchor} }}",
        f"```python\n{method.signature}\n```",
        markdown(method.doc),
    ]
    if "**options" in method.signature and owner == "LanguageModel":
        parts.append("`options` are [generation options](options.md).")
    parts.append(_returned(method.returns, page))
    return parts


def _class(kind: type, page: str, level: int = 2) -> list[str]:
    parts = [f"{'#' * level} `{kind.__name__}` {{ #{kind.__name__.lower()} }}"]
    doc = inspect.cleandoc(kind.__doc__ or "")
    parts.append(markdown(re.sub(r"\n*Attributes:\n(?: {4}.*\n?|\n)*", "\n", doc)))
    fields = docstrings.attributes(kind)
    if fields:
        rows = [
            [code(item.name), code(item.type), code(item.default), escape(item.description)]
            for item in fields
        ]
        parts.append(table(["Attribute", "Type", "Default", "Description"], rows))
    for method in docstrings.methods(kind):
        parts += _callable(method, page, level + 1, kind.__name__)
    return parts


def api_page() -> str:
    """Return the page of all names that `import unspool` gives."""
    rows = []
    for name in sorted(unspool.__all__, key=str.lower):
        value = getattr(unspool, name)
        target = f"#{name.lower()}"
        doc = value.__doc__
        if inspect.isclass(value) and issubclass(value, Exception):
            target = f"errors.md#{name.lower()}"
        elif name == "Options":
            target = "options.md"
        elif name == "__version__":
            target, doc = "#version", "The version of the package, a string."
        elif name == "gap":
            doc = "A gap in a text for `LanguageModel.fill`."
        rows.append([f"[`{name}`]({target})", escape(summary(doc))])
    parts = [
        "# Python API reference",
        "This page lists every public name of `import unspool`: functions, classes, methods and "
        "attributes. It is generated from the docstrings. The classes of other results are in "
        "[result types](result-types.md).",
        table(["Name", "What it is"], rows),
    ]
    for value in public_functions():
        parts += _callable(docstrings.function(value), _API, 2)
    order = ["LanguageModel", "Generation", "Generations", "Step", "Score", "Tokenizer"]
    kinds = {kind.__name__: kind for kind in public_classes()}
    for name in sorted(kinds, key=lambda name: order.index(name) if name in order else 99):
        parts += _class(kinds[name], _API)
    parts += [
        "## `gap` { #gap }",
        markdown(type(unspool.gap).__doc__),
        "`gap` is an instance of [Gap](result-types.md#gap): use it as it is, or call it with a "
        "length.",
        "## `__version__` { #version }",
        "The version of the package, a string such as `1.0.0`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def results_page() -> str:
    """Return the page of classes that methods return."""
    parts = [
        "# Python result types reference",
        "This page lists the classes that the methods of `LanguageModel` return, with their "
        "attributes and methods. It is generated from the docstrings.",
    ]
    for heading, kinds in result_types().items():
        parts.append(f"## {heading}")
        for kind in kinds:
            parts += _class(kind, _RESULTS, 3)
    return "\n\n".join(part for part in parts if part) + "\n"


def undocumented() -> list[str]:
    """Return the public names without a docstring or a comment."""
    missing = [f.__name__ for f in public_functions() if not f.__doc__]
    for kind in [*public_classes(), *(k for kinds in result_types().values() for k in kinds)]:
        if not kind.__doc__:
            missing.append(kind.__name__)
        items = [(item.name, item.description) for item in docstrings.attributes(kind)]
        items += [(item.name, item.doc) for item in docstrings.methods(kind)]
        missing += [f"{kind.__name__}.{name}" for name, text in items if not text]
    return missing
