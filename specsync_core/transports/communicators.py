"""NCCL called directly, on the current stream: through the engine's communicator, or one of our own."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import torch
from torch import Tensor

from specsync_core.groups import Group

NCCL_TAKES = frozenset(
    getattr(torch, name) for name in ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
)
"""dtypes that every NCCL binding knows; the bytes of the others travel."""


class Communicator(Protocol):
    """Broadcasts from group rank 0 on a stream; several between `start` and `end` are one launch."""

    def start(self) -> None: ...

    def end(self) -> None: ...

    def broadcast(self, tensor: Tensor, stream: torch.cuda.Stream) -> None: ...


class EngineCommunicator:
    """SGLang's or vLLM's PyNccl communicator.

    The engines keep it disabled outside their own graphs, and a disabled one returns without a word: every rank
    would keep its own values. It is enabled for the time of a call.
    """

    def __init__(self, pynccl: Any) -> None:
        self._pynccl = pynccl
        self._was_disabled = False

    def start(self) -> None:
        self._was_disabled = self._pynccl.disabled
        self._pynccl.disabled = False
        self._pynccl.group_start()

    def end(self) -> None:
        try:
            self._pynccl.group_end()
        finally:
            self._pynccl.disabled = self._was_disabled

    def broadcast(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self._pynccl.broadcast(as_bytes_where_needed(tensor), 0)  # on the current stream, which is `stream`


class OwnCommunicator:
    """A communicator made with NVIDIA's bindings (``nccl4py``), for groups that bring none. Collective to make."""

    def __init__(self, group: Group) -> None:
        import torch.distributed as dist
        from nccl import core as nccl  # type: ignore[import-not-found,import-untyped,unused-ignore]

        self._nccl = nccl
        known: list[Any] = [bytes(nccl.get_unique_id()) if group.rank_in_group == 0 else None]
        ranks = dist.get_process_group_ranks(group.cpu_group)
        dist.broadcast_object_list(known, src=ranks[0], group=group.cpu_group)
        unique_id = nccl.UniqueId.from_bytes(known[0])
        self._communicator = nccl.Communicator.init(group.world_size, group.rank_in_group, unique_id)

    def start(self) -> None:
        self._nccl.group_start()

    def end(self) -> None:
        self._nccl.group_end()

    def broadcast(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        tensor = as_bytes_where_needed(tensor)
        if tensor.numel():
            self._communicator.broadcast(tensor, tensor, 0, stream=stream.cuda_stream)


def as_bytes_where_needed(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that NCCL knows."""
    return tensor if tensor.dtype in NCCL_TAKES else tensor.reshape(-1).view(torch.uint8)


def engine_communicator(group: Group) -> EngineCommunicator | None:
    """Return the engine's direct communicator for a group, or None: under DP attention SGLang makes none."""
    for owner in (group, getattr(group, "device_communicator", None)):
        pynccl = getattr(owner, "pynccl_comm", None)
        if pynccl is not None and getattr(pynccl, "available", True) and hasattr(pynccl, "group_start"):
            return EngineCommunicator(pynccl)
    return None


def has_own_bindings() -> bool:
    """Whether ``nccl4py`` is installed."""
    return importlib.util.find_spec("nccl") is not None
