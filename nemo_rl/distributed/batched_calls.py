"""Calls of coroutines that are made at the same time, sent as one: each call to a process costs about a millisecond."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any


class BatchedCalls[Item, Result]:
    """Collects items until everything that is ready has run, then awaits `call(items)`. Belongs to one event loop.

    `one_at_a_time`: items that arrive during a call wait for its end.
    """

    def __init__(self, call: Callable[[list[Item]], Awaitable[Result]], *, one_at_a_time: bool = False) -> None:
        self._call = call
        self._turn: AbstractAsyncContextManager[Any] = asyncio.Lock() if one_at_a_time else nullcontext()
        self._waiting: list[Item] = []
        self._next: asyncio.Task[Result] | None = None  # the call that takes what waits
        self._running: set[asyncio.Task[Result]] = set()  # the event loop would not keep them

    def add(self, item: Item) -> asyncio.Task[Result]:
        """Put `item` into the next call, whose result the task has."""
        self._waiting.append(item)
        if self._next is None:
            self._next = asyncio.create_task(self._send())
            self._running.add(self._next)
            self._next.add_done_callback(self._running.discard)
        return self._next

    async def _send(self) -> Result:
        await asyncio.sleep(0)
        async with self._turn:
            items, self._waiting, self._next = self._waiting, [], None
            return await self._call(items)
