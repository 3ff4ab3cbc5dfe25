"""``one-shot``: one kernel launch per call, over memory that the GPUs of one machine share.

Group rank 0 stores the call's tensors, whatever their number and dtypes, straight into every peer's memory; peers
wait there, compare, count and overwrite, all in one kernel. `one_shot_protocol` has the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specsync_core.counters import Counted
from specsync_core.device_counts import GapNote, requests_of, value_of
from specsync_core.groups import Group
from specsync_core.payload import Packet, dtype_name
from specsync_core.registry import Site
from specsync_core.transports import one_shot_protocol as protocol
from specsync_core.transports.base import Move, copy_all_, stage
from specsync_core.transports.one_shot_channel import Channel, open_channel
from specsync_core.transports.one_shot_draw import Draw, make_draw
from specsync_core.transports.one_shot_protocol import Header, chunks_of, lanes_of

WAIT_S = 120.0
"""How long a kernel waits for another rank before it gives up and the group stops."""
OVERWRITE, COMPARE_ONLY, FETCH = 0, 1, 2


@dataclass
class _Prepared:
    """What is fixed for one signature."""

    header: int
    sizes: tuple[int, ...]
    lanes: int
    stats: Tensor
    scratch: list[Tensor]
    """Contiguous tensors of the signature: staging for views, and where `fetch` puts its values."""


class OneShotTransport:
    """One launch per call for any number of tensors; counts and compares in the same kernel.

    Args:
        group: ranks of one machine whose GPUs reach each other's memory.
        wait_s: seconds that a kernel waits for a peer, however long the host thinks; then the group stops, and the
            next call, or `check`, raises on every rank.
        channel: memory that is already shared (tests); None opens it, on every rank together.

    All calls of a group must be ordered on the device, as with an NCCL communicator: one stream, or events between.
    A call in a graph and an eager call continue one sequence, so a rank may replay where its peer runs eagerly.

    Graph: capturable. Capture allocates nothing, reads nothing and waits for nothing once the signature is prepared.
    """

    name = "one-shot"

    def __init__(self, group: Group, wait_s: float = WAIT_S, channel: Channel | None = None) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if channel is None else channel.inbox.device
        self.channel = channel if channel is not None else open_channel(group, self._device)
        self._rank, self._world = self.channel.rank, self.channel.world
        self.device_index = self._device.index or 0
        self._stream_of = stream_reader()
        self.wait_ns = int(wait_s * 1e9)
        self._record: Any = memoryview(self.channel.record.numpy())  # type: ignore[arg-type]

    def stream(self) -> int:
        """The handle of the current stream."""
        return self._stream_of(self.device_index)

    def set_step(self, step: int) -> None:
        """Say what the engine's step is; the record of a first divergence holds it."""
        self._record[protocol.RECORD_STEP] = step

    def halt(self) -> None:
        """End the waits of this rank's kernels, from any thread: a peer will not come. Later calls raise."""
        self.channel.halt()

    def check(self) -> None:
        """Raise when the group has stopped. Reads host memory only, and costs well under a microsecond.

        Raises:
            PayloadError: the ranks' calls do not match.
            TransportError: a rank did not come in time.
        """
        if self._record[protocol.RECORD_CODE]:
            raise self.channel.error()

    def prepare(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        self._prepare(packet, tensors)
        for mode in (OVERWRITE, FETCH):
            packet.scratch[f"{self.name}/{mode}"] = self._mover(packet, tensors, mode, count=False)

    def overwrite_(self, packet: Packet, tensors: Sequence[Tensor]) -> None:
        packet.scratch[f"{self.name}/{OVERWRITE}"](tensors)

    def fetch(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        packet.scratch[f"{self.name}/{FETCH}"](tensors)
        return tensors if self._rank == 0 else self._prepared(packet).scratch

    def bind(self, packet: Packet, tensors: Sequence[Tensor], *, overwrite: bool, count: bool) -> tuple[Move, Counted]:
        """Prepare one signature for a point: the call itself, and where its counts are.

        Args:
            overwrite: False leaves the tensors as they are and only counts.
            count: compare before overwriting.
        """
        prepared = self._prepare(packet, tensors)
        move = self._mover(packet, tensors, OVERWRITE if overwrite else COMPARE_ONLY, count)
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return move, KernelCounted(packet, shapes, prepared.stats, self._rank, count)

    def bind_draw(self, slug: str, label: str, scores_BV: Tensor, *, noisy: bool, count: bool) -> tuple[Draw, Counted]:
        """Prepare a fused draw of one shape and dtype; the ranks bind it together.

        Raises:
            PayloadError: more rows than one chunk carries.
        """
        stats = torch.zeros(protocol.STATS_WORDS, dtype=torch.int64, device=self._device)
        draw = make_draw(self, slug, label, scores_BV, noisy, stats, count)
        rows = scores_BV.shape[0]
        tokens = [(torch.Size([rows]), torch.int64)]
        return draw, KernelCounted(Packet(slug, label, rows * 8), tokens, stats, self._rank, count)

    def _prepared(self, packet: Packet) -> _Prepared:
        return packet.scratch[self.name]  # type: ignore[no-any-return]

    def _prepare(self, packet: Packet, tensors: Sequence[Tensor]) -> _Prepared:
        if self.name not in packet.scratch:
            header = Header.of(packet.name, packet.label, packet.nbytes).word
            self.channel.known[header] = f"{packet.name} with {packet.label}"
            packet.scratch[self.name] = _Prepared(
                header=header,
                sizes=tuple(tensor.nbytes for tensor in tensors),
                lanes=sum(lanes_of(tensor.nbytes) for tensor in tensors),
                stats=torch.zeros(protocol.STATS_WORDS, dtype=torch.int64, device=self.channel.inbox.device),
                scratch=[torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors],
            )
        return self._prepared(packet)

    def _launcher(self, tensors: Sequence[Tensor], lanes: int, mode: int, count: bool) -> Callable[..., None]:
        from specsync_core.transports.one_shot_launch import Variant, block_for, launcher

        widths = tuple(tensor.element_size() for tensor in tensors)
        lines = lanes + (self._rank == 0)  # rank 0 stores the header among them
        block = block_for(min(lines, protocol.SLOT_LANES))
        variant = Variant(widths, self._rank, self._world, block, mode, count, lines <= block)
        return launcher(variant, self.device_index)

    def _mover(self, packet: Packet, tensors: Sequence[Tensor], mode: int, count: bool) -> Move:
        """Everything about a call that can be settled before it is."""
        prepared, channel, record = self._prepared(packet), self.channel, self._record
        launch = self._launcher(tensors, prepared.lanes, mode, count)
        stream_of, index = self._stream_of, self.device_index
        sizes, header, lanes, scratch = prepared.sizes, prepared.header, prepared.lanes, prepared.scratch
        fixed = (
            channel.inboxes, channel.state.data_ptr(), prepared.stats.data_ptr(), channel.record.data_ptr(),
            self.wait_ns,
        )  # fmt: skip
        fetched = tuple([tensor.data_ptr() for tensor in scratch])

        def move(tensors: Sequence[Tensor], _keep: object = prepared) -> None:
            if record[0]:
                raise channel.error()
            staged = tensors
            for tensor in tensors:
                if not tensor.is_contiguous():
                    staged = stage(tensors, scratch)  # a fetch writes over the copies: it does not read its own values
                    break
            addresses = tuple([tensor.data_ptr() for tensor in staged])
            targets = fetched if mode == FETCH else addresses
            launch(stream_of(index), addresses, targets, sizes, header, lanes, *fixed)
            if staged is not tensors and mode == OVERWRITE:
                copy_all_(tensors, staged)

        return move

    def __repr__(self) -> str:
        return f"OneShotTransport(group rank {self._rank} of {self._world}, {chunks_of(0)} launch per call)"


def stream_reader() -> Callable[[int], int]:
    reader = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return reader if reader is not None else lambda index: 0


class KernelCounted(Counted):
    """What the kernel counted for one signature of one site."""

    def __init__(
        self, packet: Packet, shapes: list[tuple[torch.Size, torch.dtype]], stats: Tensor, rank: int, compares: bool
    ) -> None:
        self._nbytes = packet.nbytes
        self._shapes = shapes
        self._stats = stats
        self._elements = sum(shape.numel() for shape, _ in shapes) if compares and rank else 0

    def gap_note(self, site: Site) -> GapNote:
        """Return what keeps the logit gap of the first differing lane."""
        lanes: list[int] = []
        requests = requests_of(site, self._shapes)
        for shape, dtype in self._shapes:
            nbytes = shape.numel() * dtype.itemsize
            own, requests = requests[: shape.numel()], requests[shape.numel() :]
            lanes += [own[lane * protocol.LANE_BYTES // dtype.itemsize] for lane in range(lanes_of(nbytes)) if own]
        return GapNote(self._stats, protocol.CALLS, protocol.FIRST_CALL, protocol.FIRST_LANE, 1, lanes)

    def totals(self) -> tuple[int, int, int, int, int]:
        calls, mismatches, mismatched_calls = self._stats[:3].tolist()
        return calls, calls * self._nbytes, calls * self._elements, mismatches, mismatched_calls

    def first(self) -> tuple[int, int, int, tuple[int, ...], Any, Any] | None:
        words = self._stats.tolist()
        if not words[protocol.FIRST_LANE]:
            return None
        own, root = (word & (1 << 64) - 1 for word in (words[protocol.FIRST_OWN], words[protocol.FIRST_ROOT]))
        position, index, values = decode_lane(words[protocol.FIRST_LANE] - 1, own, root, self._shapes)
        return (words[protocol.FIRST_STEP], words[protocol.FIRST_CALL], position, index, *values)


def decode_lane(
    lane: int, own: int, root: int, shapes: Sequence[tuple[torch.Size, torch.dtype]]
) -> tuple[int, tuple[int, ...], tuple[Any, Any]]:
    """Return a differing lane's tensor, the index of its first differing element, and both values of that element.

    Args:
        lane: of the call, from 0.
        own, root: the lane's 8 bytes on this rank and on group rank 0, as unsigned integers.
    """
    for position, (shape, dtype) in enumerate(shapes):  # noqa: B007 - the loop ends at the lane's tensor
        size = dtype.itemsize
        lanes = lanes_of(shape.numel() * size)
        if lane < lanes:
            break
        lane -= lanes
    width = min(size, protocol.LANE_BYTES)
    bits, mask = own ^ root, (1 << 8 * width) - 1
    element = next(place for place in range(protocol.LANE_BYTES // width) if bits >> 8 * width * place & mask)
    flat = (lane * protocol.LANE_BYTES + element * width) // size
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape)) if shape else ()
    values = tuple(_value(word >> 8 * width * element, size, dtype) for word in (own, root))
    return position, index, (values[0], values[1])


def _value(word: int, size: int, dtype: torch.dtype) -> Any:
    if size > protocol.LANE_BYTES:
        return f"{word:#x} (8 bytes of a {dtype_name(torch.empty(0, dtype=dtype))})"
    return value_of(word, dtype)
