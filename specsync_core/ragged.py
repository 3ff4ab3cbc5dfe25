"""Ragged payloads: tensors whose sizes differ between ranks (VL #31154: host-side drafts differ in *count*).

One call is two broadcasts. The first carries the sizes that group rank 0's tensors have; after it every rank knows
how much follows, so the second carries the values in one buffer of a size that all ranks derive alike. A rank learns
everything from group rank 0, and needs no agreement on shapes beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specsync_core.payload import Packet, dtype_name, signature_of
from specsync_core.transports import Transport

if TYPE_CHECKING:
    from specsync_core.registry import Site

ALIGNMENT = 16
"""Each tensor begins at a multiple of this, so that its bytes can be viewed as any dtype."""
SMALLEST_BUFFER = 256


def describe_ragged(tensors: Sequence[Tensor]) -> str:
    """Write what ranks must have in common: ``ragged int64[*], bool[*, *]``."""
    return "ragged " + ", ".join(f"{dtype_name(tensor)}[{', '.join('*' * tensor.dim())}]" for tensor in tensors)


class RaggedMove:
    """Brings group rank 0's tensors to every rank, for one choice of dtypes, dimensions and device.

    Not capturable: the host reads the sizes.

    Args:
        tensors: of the first call.
    """

    def __init__(self, site: Site, transport: Transport, is_root: bool, tensors: Sequence[Tensor]) -> None:
        self._site = site
        self._transport = transport
        self._is_root = is_root
        self._dims = [tensor.dim() for tensor in tensors]
        self._label = describe_ragged(tensors)
        self._sizes = torch.zeros(max(1, sum(self._dims)), dtype=torch.int64, device=tensors[0].device)
        self._sizes_packet = self._packet("sizes", f"sizes of {self._label}", self._sizes)
        self._buffers: dict[int, tuple[Packet, Tensor]] = {}

    def _packet(self, part: str, label: str, tensor: Tensor) -> Packet:
        packet = Packet(f"{self._site.slug}/{part}", label, tensor.nbytes)
        self._transport.prepare(packet, (tensor,))
        return packet

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return group rank 0's tensors: on group rank 0 its own, elsewhere new ones."""
        shapes = self._fetch_sizes(tensors)
        offsets, end = [], 0
        for tensor, shape in zip(tensors, shapes, strict=True):
            offsets.append(end)
            end += -(-math.prod(shape) * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        if end:
            packet, buffer = self._buffer(end)
            if self._is_root:
                for tensor, offset in zip(tensors, offsets, strict=True):
                    _view(buffer, offset, tensor, tensor.shape).copy_(tensor)
            self._transport.overwrite_(packet, (buffer,))
        else:
            buffer = self._sizes.new_empty(0, dtype=torch.uint8)
        if self._is_root:
            return list(tensors)
        parts = zip(tensors, shapes, offsets, strict=True)
        return [_view(buffer, offset, tensor, shape).clone() for tensor, shape, offset in parts]

    def _fetch_sizes(self, tensors: Sequence[Tensor]) -> list[torch.Size]:
        own = [size for tensor in tensors for size in tensor.shape]
        self._sizes.copy_(torch.tensor(own or [0], dtype=torch.int64))
        self._transport.overwrite_(self._sizes_packet, (self._sizes,))
        sizes = self._sizes.tolist()
        shapes, start = [], 0
        for dims in self._dims:
            shapes.append(torch.Size(sizes[start : start + dims]))
            start += dims
        return shapes

    def _buffer(self, nbytes: int) -> tuple[Packet, Tensor]:
        """The buffer for this many bytes: a power of two, so that few are ever made."""
        capacity = max(SMALLEST_BUFFER, 1 << (nbytes - 1).bit_length())
        if capacity not in self._buffers:
            with torch.inference_mode(False):  # it outlives the caller's mode
                buffer = torch.zeros(capacity, dtype=torch.uint8, device=self._sizes.device)
                packet = self._packet(f"values-{capacity}", f"values of {self._label}", buffer)
            self._buffers[capacity] = packet, buffer
        return self._buffers[capacity]


def _view(buffer: Tensor, offset: int, like: Tensor, shape: torch.Size) -> Tensor:
    nbytes = math.prod(shape) * like.element_size()
    if not nbytes:
        return like.new_empty(shape)
    return buffer[offset : offset + nbytes].view(like.dtype).view(shape)


def ragged_signature(tensors: Sequence[Any]) -> Any:
    """What calls must have in common to share a `RaggedMove`."""
    return tuple([(len(shape), dtype, device) for shape, dtype, device in signature_of(tensors)])


def keep_in_place(tensors: Sequence[Tensor], rank0: Sequence[Tensor]) -> list[Tensor]:
    """Overwrite the tensors that have group rank 0's shape already; the others are replaced."""
    kept = []
    for tensor, theirs in zip(tensors, rank0, strict=True):
        is_same = tensor.shape == theirs.shape
        kept.append(tensor.copy_(theirs) if is_same and tensor is not theirs else tensor if is_same else theirs)
    return kept
