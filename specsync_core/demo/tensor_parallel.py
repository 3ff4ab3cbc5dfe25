"""The engine's own collectives: what a divergence mismatches. Every wait is marked for the recorder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Marks(Protocol):
    """Marks where a rank waits. `specsync_core.diagnostics.recorder.Recorder` is one."""

    def waiting(self, what: str, detail: str = "") -> AbstractContextManager[None]: ...


class NoMarks:
    """Marks nothing: for runs whose time is measured."""

    def waiting(self, what: str, detail: str = "") -> AbstractContextManager[None]:
        return nullcontext()


class GroupCollectives:
    """All-reduce and all-gather of a tensor-parallel process group.

    Args:
        process_group: gloo for tensors on the CPU, NCCL for tensors on CUDA.
        marks: marks every wait. With a recorder on CUDA each call also waits for the stream, because an NCCL call
            returns before it communicates and the host would be found waiting somewhere else.
    """

    def __init__(self, process_group: dist.ProcessGroup, marks: Marks | None = None) -> None:
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._group = process_group
        self._marks = marks or NoMarks()
        self._wait_for_stream = marks is not None and dist.get_backend(process_group) == "nccl"
        # torch 2.13 renamed it and warns about the old name.
        self._gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def all_reduce(self, tensor: Tensor, what: str) -> Tensor:
        """Sum over the ranks, in place."""
        with self._marks.waiting("tp all-reduce", f"{what} {list(tensor.shape)}"):
            dist.all_reduce(tensor, group=self._group)
            self._settle()
        return tensor

    def all_gather(self, tensor: Tensor, what: str) -> Tensor:
        """Concatenate the ranks' ``[N, v]`` along the last dimension: ``[N, V]``."""
        count, width = tensor.shape
        gathered = tensor.new_empty(self.world_size * count, width)
        with self._marks.waiting("tp all-gather", f"{what} {list(tensor.shape)}"):
            self._gather(gathered, tensor.contiguous(), group=self._group)
            self._settle()
        return gathered.view(self.world_size, count, width).transpose(0, 1).reshape(count, -1)

    def _settle(self) -> None:
        if self._wait_for_stream and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()


def lead(cpu_group: dist.ProcessGroup, read: Callable[[], T], marks: Marks | None = None) -> T:
    """Call ``read`` on group rank 0 alone, and return what it returned there on every rank. A collective."""
    message = [read() if dist.get_rank(cpu_group) == 0 else None]
    first = dist.get_process_group_ranks(cpu_group)[0]
    with (marks or NoMarks()).waiting("request broadcast", "from rank 0, on the CPU group"):
        dist.broadcast_object_list(message, src=first, group=cpu_group)
    return message[0]  # type: ignore[return-value]
