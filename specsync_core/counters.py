"""Counters of one site: calls, bytes, elements compared, elements that differed, and the first difference.

On host tensors they are plain integers. On a device they are accumulators that the same stream updates, so that
a captured graph counts each of its replays (`specsync_core.device_counts`); reading them is the caller's host sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from specsync_core.device_counts import DeviceCounts, GapNote, StepClock, bits, requests_of, smallest_gap
from specsync_core.payload import Packet
from specsync_core.registry import Site


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
    logit_gap: float | None = None
    """Where the caller gave logits: the smallest distance between best and second-best logit of this request on this
    rank. Near 0, rounding decided; None where it is not known."""


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
    """Kept when the sync heals it. With ``one-shot``, ``call`` counts the calls of one signature."""

    @property
    def text(self) -> str:
        """``3 mismatches in 61,440 checks``; without checks, that there were none."""
        return checks_text(self.mismatches, self.compared)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


First: TypeAlias = tuple[int, int, int, tuple[int, ...], Any, Any]
"""A first difference: step, call, position of the tensor, index, own value, rank 0's value."""


class Counted(Protocol):
    """Counts of one signature that are kept elsewhere, by a transport that compares on the way."""

    def totals(self) -> tuple[int, int, int, int, int]:
        """Return calls, bytes, compared elements, mismatches and mismatched calls. May wait for the device."""
        ...

    def first(self) -> First | None:
        """Return the first difference, if there was one. May wait for the device."""
        ...

    def gap_note(self, site: Site) -> GapNote:
        """Return what keeps the logit gap of the first difference."""
        ...


def checks_text(mismatches: int, checks: int) -> str:
    """Say how much was compared with what was found: a bare "clean" would not show that anything was."""
    if not checks:
        return "nothing was compared here"
    return f"{mismatches:,} mismatch{'' if mismatches == 1 else 'es'} in {checks:,} check{'' if checks == 1 else 's'}"


def summary(stats: Iterable[SiteStats]) -> str:
    """`SiteStats.text` over all sites. Group rank 0 is what the others compare with, and checks nothing itself."""
    found = list(stats)
    return checks_text(sum(each.mismatches for each in found), sum(each.compared for each in found))


class SiteCounter:
    """Counts one site's calls on one rank."""

    def __init__(self, site: Site, mode: str, group_rank: int) -> None:
        self._site = site
        self.mode = mode
        self._group_rank = group_rank
        self._totals = [0, 0, 0, 0, 0]
        """calls, bytes, compared, mismatches, mismatched calls."""
        self._device: DeviceCounts | None = None
        self._first: FirstDivergence | None = None
        self._elsewhere: list[Counted] = []
        self._gaps: dict[int, list[GapNote]] = {}
        """By the identity of what counts: `_device`, or an element of `_elsewhere`."""

    def add(self, counted: Counted, packet: Packet | None = None) -> None:
        """Count in what a transport counts by itself, for calls of this packet's signature."""
        self._elsewhere.append(counted)
        if packet is not None and self._group_rank:
            self._keep_gap(packet, counted, counted.gap_note(self._site))

    def prepare(self, packet: Packet, tensors: Sequence[Tensor], clock: StepClock) -> None:
        """Make the device accumulators and this signature's constants, before any capture."""
        if tensors[0].device.type == "cpu":
            return
        if self._device is None:
            self._device = DeviceCounts(tensors[0].device, clock)
        self._device.prepare(packet, tensors, compares=self._group_rank > 0)
        if self._group_rank:
            layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
            self._keep_gap(packet, self._device, self._device.gap_note(requests_of(self._site, layout)))

    def _keep_gap(self, packet: Packet, source: object, note: GapNote) -> None:
        packet.scratch["gap"] = note
        self._gaps.setdefault(id(source), []).append(note)

    def count(self, packet: Packet, own: Sequence[Tensor], rank0: Sequence[Tensor] | None, step: int) -> None:
        """Count one call; ``rank0`` is what came from group rank 0, None when nothing was compared.

        Graph: capturable on device tensors; no allocation outlives the call, no host read.
        """
        if own[0].device.type != "cpu":
            assert self._device is not None, "prepare comes before the first call"
            self._device.count(packet, own, rank0 if self._group_rank else None)
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
                shapes = list(mine.shape), list(theirs.shape)
                self._first = FirstDivergence(step, totals[0], self._group_rank, name, (), *shapes)
        totals[3] += mismatches
        totals[4] += mismatches > 0

    def count_value(self, own: Any, agreed: Any, step: int, compared: bool = True) -> None:
        """Count one agreement on a host value; nothing is compared where only group rank 0 has a value of its own."""
        self._totals[0] += 1
        self._totals[2] += compared
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

    def note_gap(self, packet: Packet, tensors: Sequence[Tensor], logits: Tensor) -> None:
        """Keep how close the decision was, when this very call holds the site's first difference.

        Args:
            logits: float ``[B, V]``, ``[B, S, V]`` or ``[B * S, V]``; what this rank decided by.

        Graph: capturable on device tensors; some launches per call, so it is for callers who ask for it.
        """
        if tensors[0].device.type != "cpu":
            if (note := packet.scratch.get("gap")) is not None:
                note.note(logits)
            return
        first = self._first
        if first is None or first.logit_gap is not None or first.call != self._totals[0]:
            return
        position = [spec.name for spec in self._site.tensors].index(first.tensor)
        places = torch.arange(tensors[position].numel()).view(tensors[position].shape)
        element = sum(tensor.numel() for tensor in tensors[:position]) + int(places[first.index])
        requests = requests_of(self._site, [(tensor.shape, tensor.dtype) for tensor in tensors])
        gap = float(smallest_gap(logits, max(requests) + 1, torch.tensor([requests[element]])))
        self._first = replace(first, logit_gap=gap if gap < float("inf") else None)

    def stats(self) -> SiteStats:
        """Read the counters; on a device this waits for the stream."""
        totals, found = self._totals, [self._first]
        if self._device is not None:
            words, first = self._device.read()
            totals = [here + there for here, there in zip(totals, words, strict=True)]
            found.append(self._record(first, self._device))
        for counted in self._elsewhere:
            totals = [here + there for here, there in zip(totals, counted.totals(), strict=True)]
            found.append(self._record(counted.first(), counted))
        calls, nbytes, compared, mismatches, mismatched_calls = totals
        earliest = min(filter(None, found), key=lambda divergence: divergence.step, default=None)
        return SiteStats(self.mode, calls, nbytes, compared, mismatches, mismatched_calls, earliest)

    def _record(self, first: First | None, source: object) -> FirstDivergence | None:
        if first is None:
            return None
        step, call, position, index, own, rank0 = first
        name = self._site.tensors[position].name
        gap = next((gap for note in self._gaps.get(id(source), ()) if (gap := note.read()) is not None), None)
        return FirstDivergence(step, call, self._group_rank, name, index, own, rank0, gap)


def _readable(element: Tensor) -> Any:
    value = element.item()
    return value if isinstance(value, (int, float, bool)) else str(value)
