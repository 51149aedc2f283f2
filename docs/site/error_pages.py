"""Exception classes, and every error message of the source, as Markdown."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from docstrings import escape, markdown, table

import unspool

SOURCE = Path(__file__).parents[2] / "src" / "unspool"

# What to do about each exception that a user can meet.
FIXES = {
    "UnspoolError": "Read the message: it says what is wrong and what to do. Catch this class to "
    "catch all errors that a caller can fix; it is a `ValueError`.",
    "SettingsError": "Correct the option that the message names. [Generation options](options.md) "
    "lists all options with their types.",
    "ModelFileError": "Check the path and the format of the model. `unspool models show MODEL` "
    "describes it; download an incomplete file again.",
    "ContextError": "Shorten the prompt, lower `max_tokens`, load the model with a larger "
    "`context`, or use `endless=True`.",
    "BatchError": "Read `errors` for the texts that failed; `generations` has the others.",
    "DataError": "Correct the training data that the message names.",
    "StorageError": "Free some space on the disk of the state folder (`--state`), or restore the "
    "database if the message says that it is damaged. What was stored before stays.",
    "FolderInUseError": "Stop the process that the message names, or use another folder "
    "(`--state`, `UNSPOOL_STATE`).",
    "BusyError": "Try the same request again later, or start the server with more capacity.",
    "WorkCancelledError": "Nothing to fix: the work was cancelled.",
    "DownloadError": "Check the network and the name of the model. A gated model needs `HF_TOKEN`. "
    "With `--offline` only local files are used.",
    "MessagesRefusedError": "Correct the conversation: the chat template of the model refuses it, "
    "for example because the roles do not alternate.",
    "TorchMissingError": "Install torch: `pip install 'unspool[torch]'`.",
    "RayMissingError": "Install Ray: `pip install 'unspool[ray]'`.",
    "NoReplicaError": "Wait until a replica is ready, or look into the log of the replicas.",
    "JobChangedError": "Use the same options as before to resume the batch, or another output "
    "file.",
    "TrainingError": "Lower the learning rate, or correct the setting that the message names.",
    "RunError": "Check the name of the training run: `unspool train runs` lists them.",
    "LostProcessError": "Look into the log of the process that ended, then run the same command "
    "again to resume.",
    "RankError": "Look at the message of the process that failed: it is part of this one.",
    "GuardError": "Correct the option `guard`, or the function that it calls.",
    "BadLogitsError": "The model computed NaN or infinite logits: check the file, or load it with "
    "`dtype='float32'`.",
    "StageError": "Correct the sampling stage of your own that raised the error.",
    "NoCandidateError": "Loosen the constraints: the grammar, bans and sampling stages leave no "
    "token.",
}


@cache
def _trees() -> dict[Path, ast.Module]:
    sources = {path: path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    return {path: ast.parse(text) for path, text in sources.items() if "Error(" in text}


def exception_classes() -> dict[str, tuple[str, str, str]]:
    """Return (module, base, docstring) of every public subclass of UnspoolError."""
    classes: dict[str, tuple[str, str, str]] = {}
    for path, tree in _trees().items():
        module = ".".join(["unspool", *path.relative_to(SOURCE).with_suffix("").parts])
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                entry = (module.removesuffix(".__init__"), bases, ast.get_docstring(node) or "")
                classes[node.name] = entry
    errors = {"UnspoolError"}
    while True:
        derived = {
            name for name, (_, bases, _) in classes.items() if errors & set(bases.split(", "))
        }
        if derived <= errors:
            break
        errors |= derived
    return {name: classes[name] for name in classes if name in errors}


def _template(node: ast.expr) -> str:
    """Return a message with `{name}` where a value is put in; empty if it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        names = re.findall(r"[A-Za-z_]\w*", ast.unparse(node.value))
        return "{" + (names[-1] if names else "value") + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return ""


def messages() -> dict[str, list[str]]:
    """Return the message templates of all errors that are raised, by package folder."""
    names = set(exception_classes())
    by_folder: dict[str, set[str]] = {}
    for path, tree in _trees().items():
        parts = path.relative_to(SOURCE).parts
        folder = parts[0] if len(parts) > 1 else "unspool"
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(call, ast.Call) or not call.args:
                continue
            if ast.unparse(call.func).rpartition(".")[2] in names:
                text = " ".join(_template(call.args[0]).split())
                if len(re.sub(r"\{.*?\}", "", text)) > 12:
                    by_folder.setdefault(folder, set()).add(text)
    return {folder: sorted(texts, key=str.lower) for folder, texts in by_folder.items()}


def errors_page() -> str:
    """Return the page of exception classes."""
    classes = exception_classes()
    order = sorted(classes, key=lambda name: (name not in unspool.__all__, name != "UnspoolError"))
    parts = [
        "# Errors reference",
        "This page lists the exception classes of Unspool, what each means and how to fix it. "
        "Each message says what is wrong and what to do. Any exception that is not an "
        "`UnspoolError` is a bug: please report it.",
        "On the command line an error is one line on stderr and "
        "[exit code](command-line.md#exit-codes) 2. Over HTTP it is a "
        "[status and a JSON body](http-api.md#errors). All messages are in "
        "[error messages](error-messages.md).",
        table(
            ["Exception", "How to fix it"],
            [[f"[`{name}`](#{name.lower()})", FIXES.get(name, "")] for name in order],
        ),
    ]
    for name in order:
        module, bases, doc = classes[name]
        path = "unspool" if name in unspool.__all__ else module
        parts += [
            f"## `{name}` {{ #{name.lower()} }}",
            markdown(doc),
            f"Import: `from {path} import {name}`. Base class: `{bases}`.",
            f"**How to fix it**: {FIXES.get(name, '')}",
        ]
    parts += [
        "## `UnspoolWarning` { #unspoolwarning }",
        "Something works less well than it could, for example slower than necessary. The message "
        "says why. Import: `from unspool.errors import UnspoolWarning`. "
        '`warnings.simplefilter("ignore", UnspoolWarning)` hides it.',
    ]
    return "\n\n".join(parts) + "\n"


def messages_page() -> str:
    """Return the page of all error messages."""
    parts = [
        "# Error messages reference",
        "This page lists every error message that Unspool can give, by the part of the program "
        "that raises it. Search it for the words of your message: names in braces stand for "
        "values. It is generated from the source.",
    ]
    for folder, texts in messages().items():
        title = "Loading and general use" if folder == "unspool" else f"`{folder}`"
        parts.append(f"## {title}")
        parts.append("\n".join(f"- {escape(text)}" for text in texts))
    return "\n\n".join(parts) + "\n"
