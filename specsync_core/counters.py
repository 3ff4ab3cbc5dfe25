"""Counters of one site: calls, bytes, elements compared, elements that differed, and the first difference.

On host tensors they are plain integers. On a device they are int64 accumulators that the same stream
updates, so that a captured graph counts each of its replays; reading them is the caller's host sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specsync_core.payload import Packet
from specsync_core.registry import Site

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class FirstDivergence:
    """The first element in which this rank differed from group rank 0."""

    step: int
    """The engine's step (`SpecTpSync.step`)."""
    call: int
    """The site's call on this rank, from 1."""
    group_rank: int
    tensor: str
    """Name in the registry."""
    index: tuple[int, ...]
    own: Any
    rank0: Any
    """Group rank 0's value; for an agreement, the agreed one."""


@dataclass(frozen=True)
class SiteStats:
    """What one rank counted at one site."""

    mode: str
    calls: int = 0
    bytes: int = 0
    compared: int = 0
    """Elements compared with group rank 0's."""
    mismatches: int = 0
    """Elements that differed; in sync mode they were healed."""
    mismatched_calls: int = 0
    first_divergence: FirstDivergence | None = None
    """None without a difference, and in captured graphs whose transport does not compare by itself: there only the
    counts are kept. With ``one-shot``, ``call`` counts the calls of one signature."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Counted(Protocol):
    """Counts of one signature that are kept elsewhere, by a transport that compares on the way."""

    def totals(self) -> tuple[int, int, int, int, int]:
        """Return calls, bytes, compared elements, mismatches and mismatched calls. May wait for the device."""
        ...

    def first(self) -> tuple[int, int, int, tuple[int, ...], Any, Any] | None:
        """Return the first difference: step, call, position of the tensor, index, own value, rank 0's value."""
        ...


def bits(tensor: Tensor) -> Tensor:
    """View a tensor's elements as integers (complex: as pairs), so that equal NaNs are equal."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(_BITS[tensor.element_size()])


class SiteCounter:
    """Counts one site's calls on one rank."""

    def __init__(self, site: Site, mode: str, group_rank: int) -> None:
        self._site = site
        self._mode = mode
        self._group_rank = group_rank
        self._totals = [0, 0, 0, 0, 0]
        """calls, bytes, compared, mismatches, mismatched calls."""
        self._device_totals: Tensor | None = None
        self._first: FirstDivergence | None = None
        self._elsewhere: list[Counted] = []

    def add(self, counted: Counted) -> None:
        """Count in what a transport counts by itself."""
        self._elsewhere.append(counted)

    def prepare(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        """Make the device accumulators and this signature's increments, before any capture."""
        if tensors[0].device.type == "cpu":
            return
        device = tensors[0].device
        if self._device_totals is None:
            self._device_totals = torch.zeros(5, dtype=torch.int64, device=device)
        elements = sum(tensor.numel() for tensor in tensors)
        compared = elements if self._group_rank else 0
        packet.scratch["counter"] = torch.tensor([1, packet.nbytes, compared, 0, 0], dtype=torch.int64, device=device)

    def count(self, packet: Packet, own: Sequence[Tensor], rank0: Sequence[Tensor] | None, step: int) -> None:
        """Count one call; ``rank0`` is what came from group rank 0, None when nothing was compared.

        Graph: capturable on device tensors; no allocation outlives the call, no host read.
        """
        if own[0].device.type != "cpu":
            self._count_on_device(packet, own, rank0)
            return
        totals = self._totals
        totals[0] += 1
        totals[1] += packet.nbytes
        if rank0 is None or self._group_rank == 0:
            return
        mismatches = 0
        for position, (mine, theirs) in enumerate(zip(own, rank0, strict=True)):
            totals[2] += mine.numel()
            if mine is not theirs and not torch.equal(mine, theirs):
                mismatches += self._mismatches(position, mine, theirs, step)
        totals[3] += mismatches
        totals[4] += mismatches > 0

    def count_ragged(self, own: Sequence[Tensor], rank0: Sequence[Tensor], step: int) -> None:
        """Count one call whose host tensors may differ in shape from group rank 0's: then all of the larger differs."""
        totals = self._totals
        totals[0] += 1
        totals[1] += sum(tensor.nbytes for tensor in rank0)
        if self._group_rank == 0:
            return
        mismatches = 0
        for position, (mine, theirs) in enumerate(zip(own, rank0, strict=True)):
            totals[2] += max(mine.numel(), theirs.numel())
            if mine.shape == theirs.shape:
                mismatches += self._mismatches(position, mine, theirs, step)
                continue
            mismatches += max(mine.numel(), theirs.numel())
            if self._first is None:
                name = f"shape of {self._site.tensors[position].name}"
                shapes = [list(tensor.shape) for tensor in (mine, theirs)]
                self._first = FirstDivergence(step, totals[0], self._group_rank, name, (), *shapes)
        totals[3] += mismatches
        totals[4] += mismatches > 0

    def count_value(self, own: Any, agreed: Any, step: int) -> None:
        """Count one agreement on a host value."""
        self._totals[0] += 1
        self._totals[2] += 1
        if own == agreed:
            return
        self._totals[3] += 1
        self._totals[4] += 1
        if self._first is None:
            self._first = FirstDivergence(step, self._totals[0], self._group_rank, "value", (), own, agreed)

    def _mismatches(self, position: int, mine: Tensor, theirs: Tensor, step: int) -> int:
        different = bits(mine) != bits(theirs)
        if mine.is_complex():  # two integers per element
            different = different.any(-1)
        where = different.nonzero()
        if len(where) and self._first is None:
            index = tuple(where[0].tolist())
            self._first = FirstDivergence(
                step,
                self._totals[0],
                self._group_rank,
                self._site.tensors[position].name,
                index,
                *(_readable(tensor[index]) for tensor in (mine, theirs)),
            )
        return len(where)

    def _count_on_device(self, packet: Packet, own: Sequence[Tensor], rank0: Sequence[Tensor] | None) -> None:
        assert self._device_totals is not None, "prepare comes before the first call"
        self._device_totals.add_(packet.scratch["counter"])
        if rank0 is None or self._group_rank == 0:
            return
        mismatches = sum((bits(mine) != bits(theirs)).sum() for mine, theirs in zip(own, rank0, strict=True))
        assert isinstance(mismatches, Tensor)
        self._device_totals[3].add_(mismatches)
        self._device_totals[4].add_(mismatches > 0)

    def stats(self) -> SiteStats:
        """Read the counters; on a device this waits for the stream."""
        totals = self._totals
        if self._device_totals is not None:
            totals = [host + device for host, device in zip(totals, self._device_totals.tolist(), strict=True)]
        for counted in self._elsewhere:
            totals = [here + there for here, there in zip(totals, counted.totals(), strict=True)]
        calls, nbytes, compared, mismatches, mismatched_calls = totals
        return SiteStats(self._mode, calls, nbytes, compared, mismatches, mismatched_calls, self._first_of_all())

    def _first_of_all(self) -> FirstDivergence | None:
        found = [] if self._first is None else [self._first]
        for first in filter(None, (counted.first() for counted in self._elsewhere)):
            step, call, position, index, own, rank0 = first
            name = self._site.tensors[position].name
            found.append(FirstDivergence(step, call, self._group_rank, name, index, own, rank0))
        return min(found, key=lambda divergence: divergence.step, default=None)


def _readable(element: Tensor) -> Any:
    value = element.item()
    return value if isinstance(value, (int, float, bool)) else str(value)
