"""``grouped`` on CUDA devices: one collective, then one kernel that compares, counts and overwrites.

Without Triton the counts are made by plain torch calls, which take more host time and count the same.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specsync_core.counters import Counted
from specsync_core.groups import Group
from specsync_core.payload import Packet
from specsync_core.transports import one_shot_protocol as protocol
from specsync_core.transports.base import Move, Transport, copy_all_
from specsync_core.transports.grouped import GroupedTransport
from specsync_core.transports.one_shot import KernelCounted, stream_reader
from specsync_core.transports.one_shot_protocol import lanes_of

logger = logging.getLogger("specsync")


def grouped_for(group: Group) -> Transport:
    """Return ``grouped`` for a group: with the kernel where there are CUDA GPUs and Triton, else without."""
    if torch.version.hip is not None or not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return GroupedTransport(group)
    try:
        _launcher((8,), 32, True, True, torch.cuda.current_device())
    except Exception as error:  # whatever an engine did to Triton: counting is local, so ranks may differ here
        logger.warning("grouped counts without a kernel: %s", (str(error).splitlines() or [type(error).__name__])[0])
        return GroupedTransport(group)
    return CountingGroupedTransport(group)


class CountingGroupedTransport(GroupedTransport):
    """`GroupedTransport` whose calls on device tensors end with one launch that compares, counts and overwrites.

    Graph: capturable once `bind` has seen the signature.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._rank = group.rank_in_group
        self._record = torch.zeros(protocol.RECORD_WORDS, dtype=torch.int64, pin_memory=True)
        self._steps: Any = memoryview(self._record.numpy())  # type: ignore[arg-type]
        self._stream_of = stream_reader()

    def set_step(self, step: int) -> None:
        """Say what the engine's step is; the record of a first divergence holds it. No launch: the kernel reads it."""
        self._steps[protocol.RECORD_STEP] = step

    def bind(self, packet: Packet, tensors: Sequence[Tensor], *, overwrite: bool, count: bool) -> tuple[Move, Counted]:
        """As `CountingTransport.bind`; for device tensors."""
        self.prepare(packet, tensors)
        compare = count and self._rank > 0
        sizes, widths = (tuple(getattr(each, name) for each in tensors) for name in ("nbytes", "itemsize"))
        lanes = sum(map(lanes_of, sizes))
        device = tensors[0].device
        index = device.index or 0
        stats = torch.zeros(protocol.STATS_WORDS, dtype=torch.int64, device=device)
        staging = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in tensors]
        launch = _launcher(widths, lanes, compare and overwrite, compare, index)
        fixed = (sizes, lanes, stats.data_ptr(), self._record.data_ptr())
        stream_of = self._stream_of
        plain = self._device.fetch if count or not overwrite else self._overwrite

        def move(tensors: Sequence[Tensor], _keep: object = (stats, self._record)) -> None:
            rank0 = plain(packet, tensors)
            own = tensors
            if compare and not all(tensor.is_contiguous() for tensor in tensors):
                copy_all_(staging, tensors)
                own = staging
            launch(stream_of(index), _addresses(own), _addresses(rank0), *fixed)
            if own is not tensors and overwrite:
                copy_all_(tensors, own)

        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return move, KernelCounted(packet, shapes, stats, self._rank, compare)

    def _overwrite(self, packet: Packet, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self._device.overwrite_(packet, tensors)
        return tensors


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in tensors])


@cache
def _launcher(
    widths: tuple[int, ...], lanes: int, overwrite: bool, compare: bool, device_index: int
) -> Callable[..., None]:
    """Compile for one set of widths on one device. Never call it first inside a capture."""
    from specsync_core.transports.one_shot_launch import bind_launch, block_for

    compiled, constants = compile_count(widths, block_for(lanes), overwrite, compare)
    with torch.cuda.device(device_index):
        return bind_launch(compiled, (1, 1, 1), constants)


def compile_count(
    widths: tuple[int, ...], block: int, overwrite: bool, compare: bool, target: Any = None
) -> tuple[Any, tuple[Any, ...]]:
    """Compile one variant; return it and its constants. ``target`` None is the current device."""
    from triton.compiler import ASTSource

    from specsync_core.transports.count_kernel import count_kernel
    from specsync_core.transports.one_shot_launch import WARPS, compile_source

    constants = {
        "widths": widths, "BLOCK": block, "UNIT": min(8, *widths), "OVERWRITE": overwrite, "COMPARE": compare,
    }  # fmt: skip
    signature: dict[str, Any] = {
        "addresses": ("i64",) * len(widths), "others": ("i64",) * len(widths), "sizes": ("i32",) * len(widths),
        "lanes": "i32", "stats": "i64", "record": "i64", **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    source = ASTSource(count_kernel, signature, constants)
    return compile_source(source, WARPS[block], target), tuple(constants.values())
