"""A notebook widget that streams a generation and rewrites it from any token.

    from unspool.widget import GenerationWidget

    widget = GenerationWidget(lm, "Once upon a time", max_tokens=60)
    widget                      # the last line of a cell shows it

Tokens are coloured by probability and appear as they are written. Click one to see the candidates
there; click a candidate, or type text of your own, and the text is rewritten from that token on.
Every version stays and can be shown again. `widget.generation` is the version that is shown.

Needs anywidget (`pip install 'unspool[notebook]'`). Works without a network: the script is part of
this package. The text is written on a thread, so the notebook's other cells can run meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any, Unpack

import anywidget
import traitlets

from unspool.engine.generation import Generation
from unspool.engine.request import Options
from unspool.engine.request_builder import as_strings
from unspool.engine.results import Step, StepStream
from unspool.errors import SettingsError, UnspoolError
from unspool.lm import LanguageModel
from unspool.notebook import STYLE, legend_html, tint_style
from unspool.session import Messages, Prompt

_SYNC_S = 0.08  # pause between two updates of the page
_TOP = 10  # candidates shown at a token


class GenerationWidget(anywidget.AnyWidget):  # type: ignore[misc]  # has no types
    """Streams a generation; every token can be inspected and replaced.

    Args:
        lm: The model that writes.
        prompt: Text, token ids, or a list of messages for the chat template.
        generation: A text to show instead of writing one for `prompt`.
        candidates: Number of candidates shown at a token.
        **options: As in `lm.generate`.
    """

    _esm = Path(__file__).with_name("widget.js")
    _css = STYLE + Path(__file__).with_name("widget.css").read_text(encoding="utf-8")

    tokens = traitlets.List().tag(sync=True)  # of the version that is shown, see `_token_json`
    status = traitlets.Unicode("").tag(sync=True)
    running = traitlets.Bool(False).tag(sync=True)
    prompt_text = traitlets.Unicode("").tag(sync=True)
    legend = traitlets.Unicode("").tag(sync=True)
    version = traitlets.Int(0).tag(sync=True)  # index into `versions`
    num_versions = traitlets.Int(0).tag(sync=True)

    def __init__(
        self,
        lm: LanguageModel,
        prompt: Prompt | Messages | None = None,
        *,
        generation: Generation | None = None,
        candidates: int = _TOP,
        **options: Unpack[Options],
    ) -> None:
        if (prompt is None) == (generation is None):
            raise SettingsError("give either a prompt or a generation")
        super().__init__()
        self._lm, self._top = lm, candidates
        self._lock = threading.RLock()  # held while the version or the running stream changes
        self._stream: StepStream | None = None
        self._thread: threading.Thread | None = None
        self.versions: list[Generation] = []
        self.legend = legend_html()
        self.on_msg(self._on_message)
        if generation is not None:
            self._show(generation)
            return
        assert prompt is not None
        if not isinstance(prompt, str) and prompt and not isinstance(prompt[0], int):
            options["stop"] = as_strings(options.get("stop")) + lm.chat_template.stops
            prompt = lm.chat_prompt(prompt).ids  # type: ignore[arg-type]  # messages
        self._start(*lm.begin(prompt, **options))  # type: ignore[arg-type]

    # -- the public interface -------------------------------------------------------------------

    @property
    def generation(self) -> Generation:
        """The version that is shown; while it is written, the text so far."""
        text: Generation = self.versions[self.version]
        return text

    def stop(self) -> None:
        """Stop writing; the text so far stays."""
        with self._lock:
            stream, thread = self._stream, self._thread
        if stream is not None:
            stream.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wait(self, timeout: float | None = None) -> Generation:
        """Wait until the text is written, and return it."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return self.generation

    def rewrite(self, index: int, token: str | int) -> None:
        """Put another token (an id, or text) at a position, and write on from there."""
        self.stop()
        self._resume(self.generation.rewind(index).choose(token))

    def resume(self) -> None:
        """Write on at the end of the text."""
        self.stop()
        self._resume(self.generation)

    def show_version(self, index: int) -> None:
        """Show an earlier version of the text, or a later one."""
        if not 0 <= index < len(self.versions):
            raise SettingsError(f"version must be from 0 to {len(self.versions) - 1}, got {index}")
        self.stop()
        self.version = index
        self._update()

    # -- writing --------------------------------------------------------------------------------

    def _resume(self, text: Generation) -> None:
        self._start(*text.start_resume())

    def _start(self, text: Generation, stream: StepStream) -> None:
        """Add a version, and write it on a thread."""
        with self._lock:
            self._stream = stream
            self.running = True  # before the text is shown, so that its status is "writing"
            self._show(text)
            self._thread = threading.Thread(target=self._write, args=(text, stream), daemon=True)
            self._thread.start()

    def _show(self, text: Generation) -> None:
        self.versions.append(text)
        self.num_versions = len(self.versions)
        self.version = len(self.versions) - 1
        self.prompt_text = self._lm.tokenizer.decode(text.prompt)
        self._update()

    def _write(self, text: Generation, stream: StepStream) -> None:
        """Read the stream to its end; the page is updated every `_SYNC_S` seconds."""
        updated_at = time.monotonic()
        error = ""
        try:
            for _ in text.extend(stream):
                if time.monotonic() - updated_at > _SYNC_S:
                    self._update()
                    updated_at = time.monotonic()
        except UnspoolError as failure:
            error = str(failure)
        finally:
            with self._lock:
                self._stream = None
                self.running = False
                self._update(error)

    def _update(self, error: str = "") -> None:
        text = self.generation
        self.tokens = [_token_json(step) for step in list(text.steps)]
        count, reason = len(text.steps), "writing" if self.running else text.finish_reason
        self.status = error or f"{count} tokens, {reason}, seed {text.seed}"

    # -- messages of the page -------------------------------------------------------------------

    def _on_message(self, _widget: object, message: Any, _buffers: object) -> None:
        try:
            self._handle(message if isinstance(message, dict) else {})
        except UnspoolError as error:
            self.status = str(error)

    def _handle(self, message: dict[str, Any]) -> None:
        kind, index = message.get("kind"), message.get("index")
        if kind == "stop":
            self.stop()
        elif kind == "resume":
            self.resume()
        elif kind == "version" and isinstance(index, int):
            self.show_version(index)
        elif kind == "candidates" and isinstance(index, int):
            candidates = [
                {"token": c.token, "text": c.text, "probability": math.exp(c.logprob)}
                for c in self.generation.alternatives(index, self._top)
            ]
            self.send({"kind": "candidates", "index": index, "candidates": candidates})
        elif kind == "rewrite" and isinstance(index, int):
            token = message.get("token", message.get("text"))
            if isinstance(token, int | str) and token != "":
                self.rewrite(index, token)


def _token_json(step: Step) -> dict[str, Any]:
    """A token as the page shows it; a tint instead of a scale, so that the page needs none."""
    probability = math.exp(step.logprob)
    # A control token has no text, and a part of a character has none yet.
    text = step.text or ("" if step.bytes else f"⟨{step.token}⟩")
    return {
        "token": step.token,
        "text": text,
        "probability": probability,
        "style": tint_style(probability),
        "chosen": step.chosen,
    }
