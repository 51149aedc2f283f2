"""The adapters of one engine: loaded and let go while texts are written, each under a name.

A name stands for a number, which the rows of a step carry to the backend. A number is never used
twice, so that what was computed with an old adapter is not taken for what a new one of the same
name would give. The old one's matrices are kept until the last text with it has ended.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from unspool.engine.loop import Loop
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from unspool.backends.base import Adapter, Twin


class EngineAdapters:
    """What `Engine` knows of adapters."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._numbers: dict[str, int] = {}
        self._twins: dict[str, Twin] = {}
        self._retired: set[int] = set()  # let go, and perhaps still in use
        self._count = 0
        loop.tree.adapter_unused = self._free_unused

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def number(self, name: str | None) -> int:
        """What the rows of a text with this adapter carry; 0: without one."""
        if name is None:
            return 0
        number = self._numbers.get(name)
        if number is None:
            known = ", ".join(self._numbers) or "none"
            raise SettingsError(
                f"there is no adapter {name[:100]!r} (loaded: {known}); load it with "
                "lm.load_adapter(name, folder)"
            )
        return number

    def twin(self, name: str | None) -> Twin | None:
        """How this adapter fills a canvas, if it says so."""
        self.number(name)
        return None if name is None else self._twins.get(name)

    def load(self, name: str, adapter: Adapter) -> None:
        """Have an adapter under this name from now on, also where there was another."""

        def put() -> None:
            self._loop.backend.set_adapter(self._count + 1, adapter)
            self._count += 1
            self._retire(name)
            self._numbers[name] = self._count
            if adapter.twin is not None:
                self._twins[name] = adapter.twin

        self._loop.call(put)

    def unload(self, name: str) -> None:
        """Texts that are being written with it go on; new ones find it no more."""
        self.number(name)
        self._loop.call(lambda: self._retire(name))

    def _retire(self, name: str) -> None:
        if name in self._numbers:
            self._retired.add(self._numbers.pop(name))
            self._twins.pop(name, None)
        self._free_retired()

    def _free_unused(self, number: int) -> None:
        """The last text with an adapter has ended: free it between two steps, if it is retired."""
        if number in self._retired:
            with contextlib.suppress(UnspoolError):  # the engine is being closed
                self._loop.tell(self._free_retired)

    def _free_retired(self) -> None:
        for number in sorted(self._retired):
            if self._loop.tree.index.forget(number):
                self._loop.backend.set_adapter(number, None)
                self._retired.discard(number)
