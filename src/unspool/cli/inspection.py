"""`unspool tokenize`, `score`, `futures` and `replay`: inspect a text or a saved generation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o
from unspool.cli import output as out
from unspool.errors import ModelFileError, SettingsError, count

if TYPE_CHECKING:
    from rich.text import Text

    from unspool.decoding.search.futures import FutureNode
    from unspool.lens.trace import Trace
    from unspool.model.files.checkpoint import Checkpoint
    from unspool.text.tokenizer.tokenizer import Tokenizer


# -- tokenize --------------------------------------------------------------------------------------


def tokenize(
    text: Annotated[str | None, typer.Argument(help="The text; - or none reads stdin.")] = None,
    model: o.Model = None,
    vocabulary: Annotated[
        str | None,
        typer.Option(help="gpt2, cl100k, o200k, a .tiktoken or tokenizer.json file, or a folder."),
    ] = None,
    merges: Annotated[bool, typer.Option("--merges", help="Show the BPE merges.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, on one line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    specials: Annotated[
        bool, typer.Option("--specials", help="Recognize special tokens in the text.")
    ] = False,
    offline: o.Offline = False,
) -> None:
    """Split a text into tokens: pieces in colour, ids, bytes.

    [b]Examples[/b]

      unspool tokenize "Why do leaves change color in fall?"
      unspool tokenize "unspooling" --merges
      unspool tokenize --ids < notes.txt
    """
    from unspool.text.tokenizer.pieces import readable_pieces

    prompt = o.read_prompt(text)
    tokenizer = open_vocabulary(model, vocabulary, offline)
    tokens = tokenizer.encode(prompt, specials=specials)
    if ids:
        print(*tokens)
    elif as_json:
        pieces = list(map(tokenizer.token_bytes, tokens))
        rows = [
            {"id": token, "text": readable, "bytes": list(piece)}
            for token, piece, readable in zip(tokens, pieces, readable_pieces(pieces), strict=True)
        ]
        print(json.dumps(rows, ensure_ascii=False))
    elif merges:
        _print_merges(tokenizer, prompt)
    else:
        _print_pieces(tokenizer, prompt, tokens)


def find_checkpoint(model: str | None, offline: bool) -> Checkpoint:
    """Open a model by name, path or repo id."""
    from unspool.model.files.checkpoint import open_checkpoint
    from unspool.model.hub.find import find_model

    return open_checkpoint(find_model(model, offline=offline))


def open_vocabulary(model: str | None, vocabulary: str | None, offline: bool) -> Tokenizer:
    """The tokenizer of a model, or a vocabulary by name or file."""
    from unspool.text.tokenizer.tokenizer import Tokenizer

    if vocabulary is not None:
        if model is not None:
            raise SettingsError("give --model or --vocabulary, not both")
        if vocabulary.endswith(".json") or Path(vocabulary).is_dir():
            return Tokenizer.from_file(vocabulary)
        return Tokenizer.from_tiktoken(vocabulary)
    from unspool.loading import open_tokenizer

    checkpoint = find_checkpoint(model, offline)
    tokenizer = open_tokenizer(checkpoint)
    if tokenizer is None:
        raise ModelFileError(
            f"{checkpoint.path}: has no vocabulary; put its tokenizer.json next to the weights"
        )
    return tokenizer


def _print_pieces(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    from rich.table import Table
    from rich.text import Text

    from unspool.text.tokenizer.pieces import readable_pieces
    from unspool.text.tokenizer.stream import TextStream

    console = out.stdout_console()
    line, stream = Text(), TextStream()
    for number, token in enumerate(ids):  # a character of several tokens appears with the last one
        line.append(stream.push(tokenizer.token_bytes(token)), out.piece_style(number))
    line.append(stream.finish())
    console.print(line)
    table = Table("id", "piece", "bytes", box=None)
    pieces = list(map(tokenizer.token_bytes, ids))
    for number, piece in enumerate(readable_pieces(pieces)):
        cell = Text(out.visible(piece), out.piece_style(number))
        table.add_row(str(ids[number]), cell, pieces[number].hex(" "))
    console.print(table)
    console.print(
        f"{count(len(ids), 'token')}, {count(len(text), 'character')}, "
        f"{count(len(text.encode()), 'byte')}: "
        f"{len(text) / max(1, len(ids)):.2f} characters per token"
    )


def _print_merges(tokenizer: Tokenizer, text: str) -> None:
    from rich.text import Text

    from unspool.text.tokenizer.bpe import merge_steps
    from unspool.text.tokenizer.pieces import readable_pieces

    def draw(pieces: tuple[bytes, ...]) -> Text:
        line = Text()
        for number, piece in enumerate(readable_pieces(pieces)):
            line.append(out.visible(piece), out.piece_style(number))
            line.append(" ")
        return line

    console = out.stdout_console()
    for word in merge_steps(tokenizer, text):
        console.print(Text("          ").append_text(draw(word.start)))
        for merge in word.merges:
            console.print(Text(f"{merge.rank:>8}  ", style="dim").append_text(draw(merge.pieces)))
        console.print(Text("          → " + " ".join(map(str, word.ids)), style="bold"))


# -- score -----------------------------------------------------------------------------------------


@o.model_options
def score(
    text: Annotated[str | None, typer.Argument(help="The text; - or none reads stdin.")] = None,
    top: Annotated[int, typer.Option(help="Also show the k most likely tokens.")] = 0,
    as_json: o.Json = False,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Score a text: the probability and surprise of each token, and the perplexity.

    [b]Examples[/b]

      unspool score "The cat sat on the mat"
      unspool score --top 3 "Paris is the capital of Germany"
      unspool score --json < essay.txt
    """
    prompt = o.read_prompt(text)
    result = model_choice.load().score(prompt, top=top)
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    console = out.stdout_console()
    line = Text()
    for position in result.positions:
        logprob = position.logprob
        style = "dim" if logprob is None else out.probability_style(math.exp(logprob))
        line.append(position.text, style)
    console.print(line)
    console.print(out.legend())
    if top or console.is_terminal:
        table = Table("token", "id", "probability", "surprise (bits)", "rank", box=None)
        if top:
            table.add_column(f"{top} most likely")
        for position in result.positions:
            if position.logprob is None:
                cells = ["–", "–", "–"]
            else:
                bits = -position.logprob / math.log(2)
                rank = str((position.rank or 0) + 1)
                cells = [f"{math.exp(position.logprob):.2%}", f"{bits:.2f}", rank]
            best = [f"{out.visible(c.text)} {c.probability:.1%}" for c in position.candidates]
            extra = ["  ".join(best)] if top else []
            table.add_row(out.visible(position.text), str(position.token), *cells, *extra)
        console.print(table)
    console.print(f"{count(len(result.tokens), 'token')}, {result.describe()}")


# -- futures ---------------------------------------------------------------------------------------


@o.model_options
def futures(
    text: Annotated[str | None, typer.Argument(help="The text; - or none reads stdin.")] = None,
    mass: Annotated[float, typer.Option(help="Leave out less likely continuations.")] = 0.01,
    depth: Annotated[int, typer.Option(help="Tokens of a continuation, at most.")] = 8,
    nodes: Annotated[int, typer.Option(help="Tokens in the tree, at most.")] = 500,
    chat: Annotated[bool, typer.Option("--chat", help="The text is a question.")] = False,
    as_json: o.Json = False,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Show the most likely continuations as a tree, with their exact probabilities.

    Nothing is sampled. A percentage is that of the whole continuation up to there.

    [b]Examples[/b]

      unspool futures "The sky is" --mass 0.05 --depth 4
      unspool futures --chat "What is the capital of France?"
      unspool futures "The sky is" --json
    """
    prompt = o.read_prompt(text)
    lm = model_choice.load()
    start = lm.chat_prompt(prompt).ids if chat else prompt
    result = lm.futures(start, mass=mass, depth=depth, nodes=nodes)
    if as_json:
        fields = ("number", "token", "text", "probability", "mass", "other_probability", "finished")
        rows = [
            {name: getattr(node, name) for name in fields}
            | {"parent": None if node.parent is None else node.parent.number}
            for node in result.root.walk()
        ]
        out.print_json(rows)
        return
    from rich.text import Text

    console = out.stdout_console()
    listed: list[tuple[FutureNode, str]] = [(result.root, "")]
    while listed:
        node, indent = listed.pop()
        if node.parent is not None:
            line, parent = Text(f"{node.mass:7.2%}  {indent}", style="dim"), node
            line.append(out.visible(parent.text), out.probability_style(parent.probability))
            while len(parent.children) == 1:  # one line, down to the next fork
                parent = parent.children[0]
                line.append(out.visible(parent.text), out.probability_style(parent.probability))
            line.append(f"  {parent.mass:.2%}" * (parent is not node), "dim")
            line.append("  ends" * parent.finished, "dim")
            console.print(line, soft_wrap=True)
            node = parent
        below = indent + "  " * (node.parent is not None)
        listed += [(child, below) for child in reversed(node.children)]
    num_nodes = sum(1 for _ in result.root.walk()) - 1
    covered = sum(node.mass for node in result.root.walk() if not node.children)
    print(
        f"{count(num_nodes, 'token')}, {result.seconds:.1f} s; together {covered:.1%} of the mass"
    )


# -- replay ----------------------------------------------------------------------------------------


@o.model_options
def replay(
    file: Annotated[str, typer.Argument(help="A trace, saved by unspool run --trace FILE.")],
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Generate a saved text again, and compare.

    Exit code 0: all tokens are equal. 1: they differ; the first difference is shown.

    [b]Examples[/b]

      unspool "Once upon a time" --seed 7 --trace story.json
      unspool replay story.json
      unspool replay story.json --model ./another-model
    """
    from rich.text import Text

    from unspool.lens.replay import replay as replay_trace
    from unspool.lens.trace import load_trace

    trace = load_trace(file)  # before the model, so that a bad file fails quickly
    dtype = "auto" if model_choice.options["quantize"] else _dtype(trace)
    lm = model_choice.load(dtype=dtype, context=_context(trace))
    result = replay_trace(lm, trace)
    line = Text()
    for step in result.generation.steps:
        style = out.probability_style(math.exp(min(0.0, step.logprob)))
        line.append(_printable(step.text), style)
    out.stdout_console().print(line)
    out.stderr_console().print(out.legend())
    out.say(result.describe())
    if result.model_difference:
        model = _printable(trace.model.name)
        out.say(f"the trace was generated by {model}; name that model with --model")
    if not result.exact:
        raise typer.Exit(1)


def _dtype(trace: Trace) -> str:
    """The precision of the trace: another one rounds differently."""
    from unspool.backends.placement import DTYPES

    return trace.model.precision if trace.model.precision in DTYPES else "auto"


def _context(trace: Trace) -> int | None:
    """The context length of the trace, if it was not the model's own."""
    context = trace.limits.context if trace.limits else None
    return None if context == trace.model.config.get("context") else context


def _printable(text: str) -> str:
    """Replace control characters, which a file may contain."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
