"""The LoRA adapters of one engine: loaded and unloaded by name while texts are generated.

A name maps to a number, which the rows of a step carry to the backend. A number is never used
twice, so that pages computed with an old adapter are not reused for a new one of the same name. The
old adapter's matrices are kept until the last text with it has ended.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from unspool.engine.loop import Loop
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from unspool.backends.base import Adapter, CanvasAdapterSettings


class EngineAdapters:
    """Loads, numbers and frees the adapters of an engine."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._numbers: dict[str, int] = {}
        self._twins: dict[str, CanvasAdapterSettings] = {}
        self._retired: set[int] = set()  # unloaded, and perhaps still in use
        self._count = 0
        loop.tree.on_adapter_unused = self._free_unused

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def number(self, name: str | None) -> int:
        """Return the number of an adapter; 0 for None. Raises SettingsError if it is not loaded."""
        if name is None:
            return 0
        number = self._numbers.get(name)
        if number is None:
            loaded = ", ".join(self._numbers) or "none"
            raise SettingsError(
                f"there is no adapter {name[:100]!r} (loaded: {loaded}); load it with "
                "lm.load_adapter(name, folder)"
            )
        return number

    def canvas_settings(self, name: str | None) -> CanvasAdapterSettings | None:
        """Return the adapter's settings for filling a canvas; None if it has none."""
        self.number(name)
        return None if name is None else self._twins.get(name)

    def load(self, name: str, adapter: Adapter) -> None:
        """Load an adapter under a name, and replace an earlier one of that name."""

        def load() -> None:
            self._loop.backend.set_adapter(self._count + 1, adapter)
            self._count += 1
            self._retire(name)
            self._numbers[name] = self._count
            if adapter.canvas is not None:
                self._twins[name] = adapter.canvas

        self._loop.call(load)

    def unload(self, name: str) -> None:
        """Unload an adapter; running texts with it are finished."""
        self.number(name)
        self._loop.call(lambda: self._retire(name))

    def _retire(self, name: str) -> None:
        if name in self._numbers:
            self._retired.add(self._numbers.pop(name))
            self._twins.pop(name, None)
        self._free_retired()

    def _free_unused(self, number: int) -> None:
        """Free an adapter whose last text has ended, between two steps, if it was unloaded."""
        if number in self._retired:
            with contextlib.suppress(UnspoolError):  # the engine is being closed
                self._loop.post(self._free_retired)

    def _free_retired(self) -> None:
        for number in sorted(self._retired):
            if self._loop.tree.index.drop_adapter(number):
                self._loop.backend.set_adapter(number, None)
                self._retired.discard(number)
