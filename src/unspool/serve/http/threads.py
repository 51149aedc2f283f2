"""What must not hold up the event loop (loading, tokenizing, compiling a grammar) goes to a thread.

A pool of its own, and not asyncio's: its size bounds how much of this goes on at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")

_pool = ThreadPoolExecutor(32, thread_name_prefix="unspool-serve")


async def in_thread(work: Callable[..., Result], *given: Any, **named: Any) -> Result:
    """Have this done on a thread. Who is cancelled meanwhile leaves it to finish unheard."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool, partial(work, *given, **named))
