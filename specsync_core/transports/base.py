"""The interface of a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from specsync_core.counters import Counted
from specsync_core.payload import Packet

Move: TypeAlias = Callable[[Sequence[Tensor]], None]
"""One call of one signature: takes its tensors."""


class Transport(Protocol):
    """Brings group rank 0's values to every rank of one group, on the current stream.

    ``packet`` stands for the signature of the call and is the same object for every call of that
    signature; a transport keeps its buffers in ``packet.scratch``.
    """

    name: str

    def prepare(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        """Make the buffers that calls of this signature need, so that a capture allocates nothing."""
        ...

    def overwrite_(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        """Overwrite ``tensors`` with the values of group rank 0, in place.

        Raises:
            TransportError: host groups only: the collective failed, or the ranks' calls do not match.
        """
        ...

    def fetch(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the values of group rank 0 and leave ``tensors`` as they are.

        The result is valid until the next call of this signature. Raises as `overwrite_` does.
        """
        ...


@runtime_checkable
class CountingTransport(Transport, Protocol):
    """A transport that compares and counts by itself, on the way."""

    def bind(self, packet: Packet, tensors: Sequence[Tensor], *, overwrite: bool, count: bool) -> tuple[Move, Counted]:
        """Prepare one signature for a point: the call itself, and where its counts are.

        Args:
            overwrite: False leaves the tensors as they are.
            count: compare with one's own values.
        """
        ...

    def set_step(self, step: int) -> None:
        """Say what the engine's step is, for the record of a first divergence."""
        ...


def stage(tensors: Sequence[Tensor], scratch: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous tensors: those that are, and copies in ``scratch`` of the others."""
    return [
        tensor if tensor.is_contiguous() else copy.copy_(tensor) for tensor, copy in zip(tensors, scratch, strict=True)
    ]


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, whatever their strides."""
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            target.copy_(source)
