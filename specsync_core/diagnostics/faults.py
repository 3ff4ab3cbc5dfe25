"""Faults on purpose: a tap that changes values, delays, drops or ends at a chosen site, group rank and step.

How faults are written is `specsync_core.diagnostics.fault_grammar`. Importing this module does not import torch.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specsync_core.errors import PolicyError
from specsync_core.registry import Site

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """One fault. Steps are the engine's (``SpecTpSync.step``)."""

    text: str
    """As it was written, for messages."""
    site: Site
    group_rank: int | None
    """None hits every rank."""
    first_step: int | None = None
    last_step: int | None = None
    probability: float | None = None
    seed: int = 0
    tensor: int = 0
    """Position among the site's tensors."""
    index: int | None = None
    add: int | float | None = None
    set: int | float | None = None
    delay_s: float | None = None
    drop: bool = False
    exit_code: int | None = None
    when: Literal["before", "after"] = "before"

    @property
    def unconditional(self) -> bool:
        """Strikes at every call, and so may be captured into a graph."""
        return self.first_step is None and self.last_step is None and self.probability is None

    def hits(self, group_rank: int) -> bool:
        return self.group_rank is None or self.group_rank == group_rank

    def matches(self, step: int) -> bool:
        is_early = self.first_step is not None and step < self.first_step
        return not is_early and (self.last_step is None or step <= self.last_step)


def check_allowed(faults: Sequence[Fault], allowed: bool) -> None:
    """Raises PolicyError where there are faults, and the operator did not consent."""
    if faults and not allowed:
        raise PolicyError(
            f"faults are given ({'; '.join(fault.text for fault in faults)}) and not allowed."
            " Set SPECSYNC_ALLOW_FAULTS=1 where wrong tokens and dead ranks do no harm, or remove the faults."
        )


def check_ranks(faults: Sequence[Fault], world_size: int) -> None:
    """Raises PolicyError where a fault is for a group rank that there is not: it would never strike."""
    if outside := [fault.text for fault in faults if fault.group_rank is not None and fault.group_rank >= world_size]:
        known = "0" if world_size == 1 else f"0 to {world_size - 1}"
        raise PolicyError(
            f"SPECSYNC_FAULTS: {'; '.join(outside)}: no such rank in a group of {world_size}."
            f" Group ranks: {known}, or 'all'."
        )


class FaultInjector:
    """A tap that commits the faults of one rank.

    Args:
        faults: from `parse_faults`; those of other ranks are kept apart and do nothing here.
        group_rank: this rank within its group.
        allowed: the operator's explicit consent (``SPECSYNC_ALLOW_FAULTS=1``).

    Raises:
        PolicyError: there are faults and no consent.

    Graph: a fault without step and probability may be captured, and then strikes at each replay. Any other is
    passed over while a graph is captured. Nothing is read from the device.

    Put it first in ``taps``: recorders then see the injected values.
    """

    def __init__(self, faults: Sequence[Fault], group_rank: int, *, allowed: bool = False) -> None:
        check_allowed(faults, allowed)
        self.faults = tuple(faults)
        self.group_rank = group_rank
        self._mine = [number for number, fault in enumerate(self.faults) if fault.hits(group_rank)]
        self._matched = [0] * len(self.faults)
        self._fired = [0] * len(self.faults)
        self._misses: dict[int, str] = {}
        self._closed = False
        for number in self._mine:
            logger.warning("FAULT INJECTION IS ACTIVE on group rank %d: %s", group_rank, self.faults[number].text)

    def before(self, site: Site, tensors: Sequence[Tensor], step: int) -> bool | None:
        """Commit what is due before the sync; False asks for the broadcast to be skipped."""
        return False if self._strike("before", site, tensors, step) else None

    def after(self, site: Site, tensors: Sequence[Tensor], step: int) -> None:
        """Commit what is due after the sync."""
        self._strike("after", site, tensors, step)

    def firings(self) -> dict[str, int]:
        """How often each fault that hits this rank has struck, by its text."""
        return {self.faults[number].text: self._fired[number] for number in self._mine}

    def unfired(self) -> tuple[str, ...]:
        """The faults of this rank that never struck, each with the reason as far as it is known."""
        return tuple(self._why_not(number) for number in self._mine if self._fired[number] == 0)

    def close(self) -> None:
        """Name in the log what never struck on this rank; more calls do nothing."""
        if not self._closed:
            self._closed = True
            for text in self.unfired():
                logger.warning("A FAULT NEVER STRUCK on group rank %d: %s", self.group_rank, text)

    def _why_not(self, number: int) -> str:
        fault, matched = self.faults[number], self._matched[number]
        if matched == 0:
            reason = f"site {fault.site} was not called at such a step"
        elif number in self._misses:
            reason = self._misses[number]
        else:
            reason = f"{matched} matching calls, but no draw, or a graph was being captured"
        return f"{fault.text}: {reason}"

    def _miss(self, fault: Fault, number: int, tensors: Sequence[Tensor]) -> None:
        """Warn, at the first time, that a call lacks what is to be changed."""
        if number not in self._misses:
            self._misses[number] = _what_is_missing(fault, tensors)
            logger.warning(
                "fault %s did not strike on group rank %d: %s", fault.text, self.group_rank, self._misses[number]
            )

    def _strike(self, when: str, site: Site, tensors: Sequence[Tensor], step: int) -> bool:
        """Commit what is due; whether the broadcast is to be dropped."""
        drop = False
        for number in self._mine:
            fault = self.faults[number]
            if fault.site.number != site.number or fault.when != when or not fault.matches(step):
                continue
            self._matched[number] += 1
            if self._is_drawn(fault, number) and self._commit(fault, number, tensors):
                drop = drop or fault.drop
        return drop

    def _is_drawn(self, fault: Fault, number: int) -> bool:
        if fault.probability is None:
            return True
        draw = random.Random(f"{fault.seed}/{self.group_rank}/{fault.site.number}/{self._matched[number]}")
        return draw.random() < fault.probability

    def _commit(self, fault: Fault, number: int, tensors: Sequence[Tensor]) -> bool:
        """Do it, if it can be done here; whether it was."""
        if not fault.unconditional and tensors and tensors[0].is_cuda and _is_capturing():
            return False
        if (fault.add is not None or fault.set is not None) and not _change_(fault, tensors):
            self._miss(fault, number, tensors)
            return False
        self._fired[number] += 1
        if fault.delay_s is not None:
            time.sleep(fault.delay_s)
        if fault.exit_code is not None:
            logger.warning("fault %s ends group rank %d", fault.text, self.group_rank)
            os._exit(fault.exit_code)
        return True


def _change_(fault: Fault, tensors: Sequence[Tensor]) -> bool:
    """Change the fault's tensor in place; False when the call does not have the tensor or the element."""
    if fault.tensor >= len(tensors) or tensors[fault.tensor].numel() <= (fault.index or 0):
        return False
    tensor = tensors[fault.tensor]
    if fault.index is not None:
        tensor = tensor[_position(fault.index, tensor.shape)]  # a view also of a non-contiguous tensor
    if fault.set is not None:
        tensor.fill_(fault.set)
    elif str(tensor.dtype) == "torch.bool":
        tensor.logical_xor_(tensor.new_full((), bool(int(fault.add or 0) % 2)))
    else:
        tensor.add_(fault.add)  # type: ignore[arg-type]
    return True


def _what_is_missing(fault: Fault, tensors: Sequence[Tensor]) -> str:
    if fault.tensor >= len(tensors):
        return f"{fault.site} was called with {len(tensors)} tensors, without its tensor {fault.tensor}"
    size = tensors[fault.tensor].numel()
    if fault.index is None or size == 0:
        return f"the tensor has no elements in a call of {fault.site}"
    return f"there is no index {fault.index} in a call of {fault.site}, whose tensor has {size} elements"


def _position(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        position.append(place)
    return tuple(reversed(position))


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()
