"""`unspool sessions`: the texts that `unspool page`, `unspool chat` and a server have stored."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from unspool.cli import options as o
from unspool.cli import output as out
from unspool.errors import SettingsError, UnspoolError, count
from unspool.store.folder import StateFolder, default_folder

sessions = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="List, show, export, import and delete stored texts.",
    epilog="Examples:  unspool sessions   ·   unspool sessions show 3f9a   ·   "
    "unspool sessions export 3f9a story.txt",
)

State = Annotated[
    Path | None,
    typer.Option(help="Folder of stored texts. Default: UNSPOOL_STATE, or data folder."),
]
Session = Annotated[str, typer.Argument(help="The id of a session, or the start of it.")]


@sessions.command("list")
def list_sessions(state: State = None, as_json: o.Json = False) -> None:
    """List stored sessions, the newest first.

    [b]Example[/b]

      unspool sessions list --json
    """
    from unspool.store import library

    with library.open_library(state or default_folder()) as db:
        stored = library.list_sessions(db)
    if as_json:
        out.print_json([asdict(session) for session in stored])
        return
    for session in stored:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(session.updated))
        facts = f"{_branches(session.branches)}, {session.tokens:,} tokens"
        tags = "".join(f" #{tag}" for tag in session.tags)
        print(f"{_short(session.id)}  {when}  {session.title or '(no title)'}{tags}  ({facts})")
    if not stored:
        out.say("there is no session yet: unspool page, unspool chat")


@sessions.command()
def show(session: Session, state: State = None, as_json: o.Json = False) -> None:
    """Print the texts of a session.

    [b]Example[/b]

      unspool sessions show 3f9a
    """
    from unspool.store import library

    with library.open_library(state or default_folder()) as db:
        matching = library.find_session(db, session)
        texts = library.texts_of(db, matching.id)
    if as_json:
        out.print_json({**asdict(matching), "texts": [asdict(text) for text in texts]})
        return
    for index, text in enumerate(texts):
        if len(texts) > 1:
            print(f"{'' if index == 0 else chr(10)}-- {text.name or text.branch} --")
        print(text.portable(None).describe())


@sessions.command()
def export(
    session: Session,
    file: Annotated[Path | None, typer.Argument(help="The file; none: stdout.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="text, markdown, messages (OpenAI, JSON lines), sharegpt, openloom, loom, mikupad "
            "or sillytavern. Default: by the name.",
        ),
    ] = None,
    branch: Annotated[
        str | None, typer.Option(help="Only this branch: the start of its id.")
    ] = None,
    state: State = None,
) -> None:
    """Write the texts of a session to a file.

    [b]Examples[/b]

      unspool sessions export 3f9a story.txt
      unspool sessions export 3f9a chat.md
      unspool sessions export 3f9a story.json --format openloom
      unspool sessions export 3f9a --format messages > data.jsonl
    """
    from unspool.store import library
    from unspool.store.formats import FORMATS, SUFFIXES, write_texts

    kind = kind or SUFFIXES.get("" if file is None else file.suffix.lower(), "text")
    if kind not in FORMATS:
        raise SettingsError(f"format must be one of {', '.join(FORMATS)}, got {kind!r}")
    with library.open_library(state or default_folder()) as db:
        matching = library.find_session(db, session)
        texts = library.texts_of(db, matching.id)
    if branch is not None:
        texts = [text for text in texts if text.branch.startswith((branch, f"branch-{branch}"))]
    if not texts:
        raise UnspoolError(f"session {_short(matching.id)} has no such text")
    content = write_texts([text.portable(matching.title) for text in texts], kind)
    if file is None:
        print(content, end="")
        return
    try:
        file.expanduser().write_text(content, encoding="utf-8")
    except OSError as error:
        raise UnspoolError(f"{file} cannot be written: {error.strerror or error}") from error
    out.say(f"wrote {count(len(texts), 'text')} to {file}")


@sessions.command("import")
@o.model_options
def import_file(
    file: Annotated[
        Path,
        typer.Argument(
            help="OpenAI messages, ShareGPT, OpenLoom, loom, mikupad, SillyTavern, Markdown, text."
        ),
    ],
    state: State = None,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Store the texts of a file as sessions. The model tokenizes and scores them.

    Versions of one text become the branches of one session.

    [b]Examples[/b]

      unspool sessions import chats.jsonl
      unspool chat --continue last
    """
    from unspool.cli.stored_chat import StoredChat
    from unspool.store.formats import read_file

    stored = read_file(file.expanduser())  # before the model, so that a bad file fails quickly
    lm = model_choice.load()
    with StoredChat((state or default_folder()).expanduser(), lm) as chat:
        for texts in stored:
            print(f"{_short(chat.add(texts))}  {texts[0].title or ''}".rstrip())


@sessions.command()
def delete(session: Session, state: State = None) -> None:
    """Delete a session with its branches.

    [b]Example[/b]

      unspool sessions delete 3f9a
    """
    from unspool.store import library

    path = (state or default_folder()).expanduser()
    with StateFolder(path):
        with library.open_library(path) as db:
            matching = library.find_session(db, session)
        library.delete_session(path, matching.id)
    out.say(f"deleted {_short(matching.id)} {matching.title}".rstrip())


def _short(identity: str) -> str:
    return identity.removeprefix("session-")[:8]


def _branches(number: int) -> str:
    return "1 branch" if number == 1 else f"{number:,} branches"
