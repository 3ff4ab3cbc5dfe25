"""Requests: only rank 0 knows the queue, and shares what arrives on the CPU group.

Each rank admits and finishes requests by *its own* lengths, as real engines do. That is what turns a divergence
into a hang: the rank whose request ends first has a free slot and asks for requests on the CPU group, while its
peer sits in the next forward's all-reduce on the tensor-parallel group (SG #33289).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice


@dataclass(frozen=True)
class Request:
    """A prompt, and how to continue it."""

    request_id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    """0 or less decodes greedily."""


@dataclass
class Running:
    """A request in a slot, as one rank sees it."""

    request: Request
    slot: int
    output: list[int] = field(default_factory=list)

    @property
    def prefix_len(self) -> int:
        """Committed tokens before the anchor; the anchor is the last of ``output``."""
        return len(self.request.prompt) + len(self.output) - 1

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.request.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        """The output, without what a last step committed beyond the request's limit."""
        return self.output[: self.request.max_new_tokens]


Arrived = tuple[list[Request], bool]
"""What came, and whether more may come."""

Lead = Callable[[Callable[[], Arrived]], Arrived]
"""Calls its argument on group rank 0 alone, and returns what came of it on every rank. A collective."""


class Scheduler:
    """Admits requests to a fixed number of slots.

    Args:
        source: the queue; read on group rank 0 only.
        slots: requests that decode at the same time.
        lead: how rank 0 shares what it read; by default there is one rank.
    """

    def __init__(self, source: Iterable[Request], slots: int, lead: Lead = lambda read: read()) -> None:
        self.running: list[Running] = []
        self._source: Iterator[Request] = iter(source)
        self._waiting: deque[Request] = deque()
        self._free = list(range(slots))
        self._open = True
        self._lead = lead

    def admit(self) -> list[Running]:
        """Poll for requests when a slot is free, and put what came into free slots. A collective when it polls."""
        if self._open and len(self._free) > len(self._waiting):
            self._poll()
        admitted = []
        while self._free and self._waiting:
            admitted.append(Running(self._waiting.popleft(), self._free.pop(0)))
        self.running += admitted
        return admitted

    def retire(self) -> list[Running]:
        """Take out the requests that are finished by this rank's lengths."""
        finished = [running for running in self.running if running.finished]
        self.running = [running for running in self.running if not running.finished]
        self._free = sorted(self._free + [running.slot for running in finished])
        return finished

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits, and nothing more will come."""
        return not (self._open or self._waiting or self.running)

    def _poll(self) -> None:
        arrived, self._open = self._lead(self._read)
        self._waiting.extend(arrived)

    def _read(self) -> Arrived:
        wanted = len(self._free) - len(self._waiting)
        arrived = list(islice(self._source, wanted))
        return arrived, len(arrived) == wanted
