"""What a captured graph may not do, watched on a CPU: a stand-in for `specsync_core.replay.Replay`.

A graph replays kernels on the addresses that it saw when it was captured, and no line of Python. So a function that
is captured may not read a value on the host, may not look at a tensor that was made after the capture, and may draw
only from the generator that the graph knows. On a GPU the real `Replay` takes the place of this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

HOST_READS = frozenset(
    ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "bincount")
)
"""Operators that wait for the device to learn a value, or a size that depends on one."""
HOST_METHODS = frozenset(("tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"))
BY_MASK = frozenset(("index", "index_put", "index_put_"))

Note = tuple[str, tuple[str, ...]]
"""What is wrong in a captured function, and the sites that are called there."""

_running = threading.local()


class CheckedReplay:
    """Calls the function directly, as `specsync_core.replay.Replay` does on a CPU, and notes what a graph forbids."""

    stale = False
    """No plan changes here."""

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        *,
        generator: Generator | None = None,
        sync: Any = None,
    ) -> None:
        self._function = function
        self._generator = generator
        self._addresses: dict[int, Tensor] | None = None
        """What the first call read from outside; kept alive, so that no address is given out again."""

    def __call__(self) -> None:
        check = _Check(self._generator)
        _running.check = check
        try:
            with check, _HostMethods(check):
                self._function()
        finally:
            _running.check = None
        if self._addresses is None:
            self._addresses = check.outside
        elif set(check.outside) - set(self._addresses):
            check.problems.append(
                "it reads a tensor that was made after the capture; copy it into a static buffer first"
            )
        notes = getattr(_running, "notes", None)
        if notes is not None:
            notes += [(problem, tuple(check.sites)) for problem in dict.fromkeys(check.problems)]


class _Check(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of one call."""

    def __init__(self, generator: Generator | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: list[str] = []
        self.sites: list[str] = []
        self.outside: dict[int, Tensor] = {}
        self.paused = False
        self._generator = generator
        self._inside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.paused:
            self._look(func.overloadpacket.__name__, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            address = _address(tensor)
            if address not in self.outside:
                self._inside[address] = tensor
        return result

    def _look(self, name: str, args: Any, kwargs: Any) -> None:
        if name in HOST_READS:
            self.problems.append(f"it reads a value on the host (aten::{name})")
        indices = args[1] if name in BY_MASK and len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
        if any(tensor.dtype == torch.bool for tensor in _tensors(indices)):
            self.problems.append(f"it indexes by a mask (aten::{name}), whose size the host must read")
        generator = kwargs.get("generator")
        if generator is not None and not _is_same(generator, self._generator):
            self.problems.append("it draws from a generator that the graph does not know; hand it to Replay")
        for tensor in _tensors((*args, *kwargs.values())):
            if (address := _address(tensor)) not in self._inside:
                self.outside[address] = tensor


class _HostMethods(TorchFunctionMode):
    """Methods that read memory without an operator."""

    def __init__(self, check: _Check) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_METHODS and not self._check.paused:
            self._check.problems.append(f"it reads a value on the host ({name})")
        return func(*args, **(kwargs or {}))


def _is_same(one: Generator, other: Generator | None) -> bool:
    """Operators see a generator in a new Python object, but with its state."""
    return other is not None and torch.equal(one.get_state(), other.get_state())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def captures_noted() -> Iterator[list[Note]]:
    """Collect what this thread's captured functions do wrong: the problem, and the sites that were called there."""
    notes: list[Note] = []
    _running.notes = notes
    try:
        yield notes
    finally:
        _running.notes = None


def enter_site(slug: str) -> bool:
    """Say that a site is called: what the sync itself does is not looked at. Returns whether this is in a capture."""
    check: _Check | None = getattr(_running, "check", None)
    if check is None:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    check.paused = True
    check.sites.append(slug)
    return True


def leave_site() -> None:
    """Say that the site's call has ended."""
    check: _Check | None = getattr(_running, "check", None)
    if check is not None:
        check.paused = False
