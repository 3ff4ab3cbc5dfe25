"""Groups of ranks: the protocol, a wrapper for torch.distributed, and which group a site uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from specsync_core.collectives import wait
from specsync_core.errors import GroupError


@runtime_checkable
class Group(Protocol):
    """What specsync asks of a group. The coordinators of SGLang and vLLM fit as they are."""

    @property
    def world_size(self) -> int: ...

    @property
    def rank_in_group(self) -> int: ...

    @property
    def cpu_group(self) -> Any:
        """A gloo ``ProcessGroup`` of the same ranks, for what the host must agree on."""
        ...

    def broadcast(self, tensor: Tensor, src: int = 0) -> Any:
        """Overwrite ``tensor`` with that of group rank ``src``, in place, on the current stream."""
        ...


class TorchGroup:
    """A ``torch.distributed`` process group as a `Group`.

    Args:
        process_group: the group; None is the default group.
        cpu_group: a gloo group of the same ranks; not needed when ``process_group`` is gloo itself.

    Raises:
        GroupError: this process is not a member, or a gloo group is missing or has other ranks.

    Graph: an NCCL group's ``broadcast`` can be captured; a gloo group's cannot.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, cpu_group: dist.ProcessGroup | None = None
    ) -> None:
        group = process_group if process_group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):  # None, or torch's marker of a group that this rank is not in
            raise GroupError(
                "TorchGroup: this process is not a member of the group."
                " Call init_process_group first, and build a TorchGroup only on the group's own ranks."
            )
        self.process_group = group
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        """Global ranks, in the order of the group ranks."""
        self.world_size = len(self.ranks)
        self.rank_in_group = dist.get_rank(group)
        self.is_gloo = dist.get_backend(group) == "gloo"
        self.cpu_group = cpu_group if cpu_group is not None else group
        if dist.get_backend(self.cpu_group) != "gloo":
            raise GroupError(
                f"TorchGroup: a {dist.get_backend(group)} group needs a gloo group of the same ranks for what the"
                f" host must agree on: TorchGroup(group, cpu_group=dist.new_group({self.ranks}, backend='gloo'))."
            )
        if (cpu_ranks := dist.get_process_group_ranks(self.cpu_group)) != self.ranks:
            raise GroupError(f"TorchGroup: the cpu_group has the global ranks {cpu_ranks}, the group {self.ranks}.")

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with that of group rank ``src``, in place.

        ``torch.distributed`` counts its ``src`` in global ranks (``group_src`` came only after 2.6).
        A tensor on the host travels over the CPU group. On gloo the wait ends early when a peer has reported a failure.

        Raises:
            TransportError: gloo only: the collective failed, timed out, or a peer gave up.
        """
        if not self.is_gloo and tensor.device.type != "cpu":
            dist.broadcast(tensor, src=self.ranks[src], group=self.process_group)
            return tensor
        group = self.process_group if self.is_gloo else self.cpu_group
        work = dist.broadcast(tensor, src=self.ranks[src], group=group, async_op=True)
        wait(work, self.cpu_group, "broadcast")
        return tensor

    def __repr__(self) -> str:
        return f"TorchGroup(group rank {self.rank_in_group} of {self.world_size}, global ranks {self.ranks})"


class EngineGroup:
    """The group of a coordinator as SGLang and vLLM have it.

    Args:
        coordinator: has ``world_size``, ``rank_in_group``, ``ranks``, ``device``, ``device_group`` and ``cpu_group``,
            and may have ``pynccl_comm`` (SGLang), or one in its ``device_communicator`` (vLLM).

    Graph: capturable. While the engine captures, its PyNccl communicator is enabled and carries the broadcast on the
    current stream; where there is none (a split attention group, SG #36963), the process group does.
    """

    def __init__(self, coordinator: Any) -> None:
        self.world_size: int = coordinator.world_size
        self.rank_in_group: int = coordinator.rank_in_group
        self.ranks: list[int] = list(coordinator.ranks)
        self.device = coordinator.device
        self.cpu_group = coordinator.cpu_group
        self.device_group = coordinator.device_group
        """The process group of the device; transports share memory in it."""
        inner = getattr(coordinator, "device_communicator", None)
        self.pynccl_comm = getattr(coordinator, "pynccl_comm", None) or getattr(inner, "pynccl_comm", None)
        """The engine's own communicator, or None."""

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with that of group rank ``src``, in place, on the current stream.

        A tensor on the host travels over the CPU group, where the wait ends early when a peer has reported a failure.
        """
        if tensor.device.type == "cpu":
            work = dist.broadcast(tensor, src=self.ranks[src], group=self.cpu_group, async_op=True)
            wait(work, self.cpu_group, "broadcast")
        elif self.pynccl_comm is not None and not self.pynccl_comm.disabled:
            self.pynccl_comm.broadcast(tensor, src=src)
        else:
            dist.broadcast(tensor, src=self.ranks[src], group=self.device_group)
        return tensor

    def __repr__(self) -> str:
        return f"EngineGroup(group rank {self.rank_in_group} of {self.world_size}, global ranks {self.ranks})"


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that an engine runs its ranks in."""

    tp: Group
    """The tensor-parallel group: the ranks that share a model's weights."""
    attn_tp: Group | None = None
    """The ranks that share one attention replica; needed under DP attention."""
    dp_attention: bool = False
    """Attention is data parallel: each attention group decodes its own requests."""

    def __post_init__(self) -> None:
        check_group(self.tp, "tp")
        if self.attn_tp is not None:
            check_group(self.attn_tp, "attn_tp")
            if self.attn_tp.world_size > self.tp.world_size:
                raise GroupError(
                    f"ParallelGroups: attn_tp has {self.attn_tp.world_size} ranks and tp {self.tp.world_size};"
                    " an attention group is part of its tensor-parallel group. Are they swapped?"
                )
        elif self.dp_attention:
            raise GroupError("ParallelGroups: dp_attention=True needs attn_tp, the group of one attention replica.")


def select_group(groups: ParallelGroups) -> Group:
    """Return the group to broadcast in: attn_tp under DP attention, else tp.

    Under DP attention the peers in other replicas decode other requests, or are idle and would not take part.
    """
    if groups.dp_attention:
        assert groups.attn_tp is not None, "ParallelGroups checks this"
        return groups.attn_tp
    return groups.tp


def consensus_group(groups: ParallelGroups, chosen: Group | None = None) -> Group:
    """Return the group to agree in: the chosen one, else tp, which is never smaller than the broadcast group.

    Raises:
        GroupError: the chosen group has one rank although a larger one exists, so that agreeing would do
            nothing (SG #39886: the memory probe stayed local that way).
    """
    if chosen is None:
        return groups.tp
    check_group(chosen, "group")
    if chosen.world_size == 1 and groups.tp.world_size > 1:
        raise GroupError(
            "an agreement over a group of one rank decides nothing while the tensor-parallel group has"
            f" {groups.tp.world_size}: pass the group of all ranks that act on the value (for a memory gate, the"
            " group that captures together), or leave group out to agree over tp."
        )
    return chosen


def check_group(group: object, name: str) -> None:
    """Refuse what is not a `Group`, naming what is missing."""
    missing = [
        member for member in ("world_size", "rank_in_group", "cpu_group", "broadcast") if not hasattr(group, member)
    ]
    if not missing:
        return
    hint = " Wrap a torch.distributed group: TorchGroup(group)." if isinstance(group, dist.ProcessGroup) else ""
    raise GroupError(f"{name}: {type(group).__name__} is not a group: it has no {', '.join(missing)}.{hint}")
