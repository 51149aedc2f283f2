"""The command line as Markdown, from the Typer application."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import typer.main
from docstrings import code, escape, table

from unspool.cli.main import app_with

EXIT_CODES = [
    ["0", "Success."],
    ["1", "`unspool replay`: the text differs. `unspool batch`: some rows or all rows failed."],
    ["2", "An error that you can fix. One line on stderr says what is wrong and what to do."],
    ["74", "The output cannot be written, for example because the disk is full."],
    ["130", "Interrupted by Ctrl-C. The output that is already written stays."],
]


def commands() -> dict[str, Any]:
    """Return every command that is not hidden, by its full name."""
    by_name: dict[str, Any] = {}

    def walk(name: str, command: Any) -> None:
        if not command.hidden:
            by_name[name] = command
            for word, child in getattr(command, "commands", {}).items():
                walk(f"{name} {word}", child)

    walk("unspool", typer.main.get_command(app_with()))
    return by_name


def _help(text: str) -> str:
    """Convert Typer's help to Markdown: bold becomes code, indented lines a block of code."""
    parts = []
    plain = re.sub(r"\[/?(b|i|bold|dim)\]", "`", text)
    blocks = [block.strip("\n") for block in re.split(r"\n\s*\n", plain.replace("\f", ""))]
    for block in blocks:
        if re.fullmatch(r"`Examples?`", block.strip()):
            continue
        if block.startswith("  "):
            parts.append(f"```sh\n{textwrap.dedent(block)}\n```")
        elif block.strip():
            parts.append(escape(" ".join(block.split())))
    return "\n\n".join(parts)


def _type(option: Any) -> str:
    kind = option.type
    if choices := getattr(kind, "choices", None):
        return ", ".join(f"`{getattr(choice, 'value', choice)}`" for choice in choices)
    if getattr(option, "is_flag", False):
        return ""
    name = str(getattr(kind, "name", kind)).replace("<", "").replace(">", "")
    plain = {"text": "text", "integer": "int", "float": "float", "boolean": "bool"}
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    bounds = f" from {least}" if least is not None else ""
    bounds += f" to {most}" if most is not None else ""
    return plain.get(name.replace(" range", ""), name) + bounds


def _default(option: Any) -> str:
    value = option.default
    if value is None or value is False or callable(value) or value in ((), [], ""):
        return ""
    if type(value).__name__ in ("Sentinel", "_Unset"):
        return ""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(getattr(value, "value", value))


def _parameters(command: Any) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    options = [o for o in options if not getattr(o, "hidden", False)]
    parts = []
    if arguments:
        rows = [
            [
                code((a.metavar or a.name).upper()),
                "" if a.required else "optional",
                escape(getattr(a, "help", "") or ""),
            ]
            for a in arguments
        ]
        parts.append(table(["Argument", "", "What it is"], rows))
    panels: dict[str, list[Any]] = {}
    for option in options:
        panel = getattr(option, "rich_help_panel", None)
        panels.setdefault(panel if isinstance(panel, str) else "", []).append(option)
    for panel, members in panels.items():
        if panel and len(panels) > 1:
            parts.append(f"**{panel}**")
        rows = []
        for option in members:
            names = ", ".join(code(name) for name in (*option.opts, *option.secondary_opts))
            default = _default(option)
            text = escape(" ".join((option.help or "").split()))
            rows.append([names, _type(option), code(default), text])
        parts.append(table(["Option", "Value", "Default", "What it does"], rows))
    return parts


def command_page() -> str:
    """Return the page with every command and option."""
    by_name = commands()
    rows = []
    for name, command in by_name.items():
        text = " ".join((command.help or "").split("\n\n")[0].split())
        if name != "unspool":
            rows.append([f"[`{name}`](#{name.replace(' ', '-')})", escape(text)])
    parts = [
        "# Command-line reference",
        "This page lists every command of `unspool` with all arguments and options (CLI "
        "reference). It is generated from the program. `unspool COMMAND --help` shows the same.",
        '`unspool "a prompt"` is short for `unspool run "a prompt"`.',
        table(["Command", "What it does"], rows),
        "## Exit codes",
        table(["Code", "Meaning"], EXIT_CODES),
    ]
    for name, command in by_name.items():
        level = "##" if name.count(" ") <= 1 else "###"
        if name == "unspool":
            parts += ["## Options of every call", *_parameters(command)]
            continue
        parts += [f"{level} `{name}` {{ #{name.replace(' ', '-')} }}", _help(command.help or "")]
        parts += _parameters(command)
    return "\n\n".join(part for part in parts if part) + "\n"
