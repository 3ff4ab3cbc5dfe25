"""The key-value store of a process group, with calls that end in time.

A call to a ``TCPStore`` whose host is stopped or cut off waits for ever, and no time-out of torch's ends it
(``check`` and ``set``, torch 2.13). Here one daemon thread makes the calls, over a connection of its own, and
the callers wait for it as long as they like. The thread also looks for news a few times a second.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakMethod, WeakSet

from torch._C._distributed_c10d import Store, TCPStore

from specsync_core.errors import TransportError

POLL_S = 0.5
"""Time between two looks for news; each costs a round trip or two."""
CALL_S = 10.0
"""How long one call may take before the store counts as lost."""

T = TypeVar("T")


class StoreLostError(TransportError):
    """The store does not answer: its host has ended, is stopped, or is cut off."""


class _Call:
    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act
        self.done = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.value = self.act()
        except Exception as error:
            self.error = error
        self.done.set()


class BoundedStore:
    """A store whose calls return or raise within `CALL_S`, from any thread.

    Args:
        store: any of torch's. A ``TCPStore`` is cloned, so that a long wait over the engine's own connection does
            not hold these calls up.
        poll: a bound method, called by the thread every `pause_s`; held weakly. What it raises says why the store is
            lost; it is called all the same from then on, and must ask the store nothing more.
    """

    def __init__(self, store: Store, poll: Callable[[], None]) -> None:
        self._store = store
        self._poll = WeakMethod(poll)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.lost: str | None = None
        """Why the store counts as lost."""
        self.pause_s = POLL_S
        """Time between two looks; ``poll`` may shorten it while something is under way."""
        self._thread = threading.Thread(target=self._serve, name="specsync-store", daemon=True)
        self._thread.start()
        _stores.add(self)

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        """Return a value that `check` has seen."""
        value: bytes = self._ask(lambda: self._store.get(key))
        return value.decode()

    def check(self, *keys: str) -> bool:
        """Whether all of these keys are there."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda: self._store.add(key, amount)))

    def delete(self, key: str) -> None:
        """Remove a key, where the store can."""

        def act() -> None:
            with suppress(RuntimeError):
                self._store.delete_key(key)

        self._ask(act)

    def _ask(self, act: Callable[[], T]) -> T:
        """Make a call on the store's thread.

        Raises:
            StoreLostError: it did not answer in time, now or before.
        """
        if threading.current_thread() is self._thread:
            return act()
        if self.lost is not None:
            raise StoreLostError(self.lost)
        call = _Call(act)
        self._calls.put(call)
        if not call.done.wait(CALL_S):
            self.lost = f"it did not answer within {CALL_S:g} s"
        elif call.error is not None:
            self.lost = (str(call.error).splitlines() or [type(call.error).__name__])[0]
        if self.lost is not None:
            raise StoreLostError(self.lost) from call.error
        return call.value  # type: ignore[no-any-return]

    def _serve(self) -> None:
        self._store = own_connection(self._store)
        next_look = time.monotonic() + self.pause_s
        while True:
            try:
                call = self._calls.get(timeout=max(0.0, next_look - time.monotonic()))
                if call is None:
                    return
                call.run()
            except queue.Empty:
                pass
            if time.monotonic() >= next_look:
                if not self._look():
                    return
                next_look = time.monotonic() + self.pause_s

    def _look(self) -> bool:
        """Look for news; False when nobody is left to hear them."""
        poll = self._poll()
        if poll is None:
            return False
        try:
            poll()
        except Exception as error:
            self.lost = self.lost or (str(error).splitlines() or [type(error).__name__])[0]
        return True

    def close(self, timeout_s: float = 0.5) -> None:
        """End the thread, unless it is stuck in a call; calls from then on are lost."""
        self.lost = self.lost or "this process has closed it"
        self._calls.put(None)
        self._thread.join(timeout_s)


def own_connection(store: Store) -> Store:
    """Clone a store that lives behind a socket; one on a file takes turns by itself."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    if isinstance(inner, TCPStore) and hasattr(store, "clone"):
        clone: Store = store.clone()
        return clone
    return store


_stores: WeakSet[BoundedStore] = WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread that comes back from native code while the interpreter ends would abort the process.
    for store in list(_stores):
        store.close()
