"""The rows that are measured on GPUs. Runs on every rank; returns microseconds by row and batch size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specsync_core.bench.step import VOCABULARY, Draw, Step, Sync
from specsync_core.bench.timing import Call, host_us, replays_us
from specsync_core.groups import TorchGroup
from specsync_core.payload import Packet, describe
from specsync_core.transports.communicators import OwnCommunicator, has_own_bindings
from specsync_core.transports.grouped import CoalescedTransport, DirectTransport
from specsync_core.transports.one_shot import OneShotTransport

BATCHES = (1, 16, 64, 2048)
STEP_BATCHES = (1, 16, 64)
HOST_BATCH = 16
CALLS_PER_GRAPH = 50
STEPS_PER_GRAPH = 20
HEAD_START_CYCLES = 400_000
"""What the devices do nothing for before a replay: 0.2 ms on an H200, in which the hosts launch the graph."""

Rows = dict[str, dict[int, float]]
"""Microseconds by row's key and batch size."""


def measure(rank: int, world_size: int, quick: bool) -> Rows:
    """Measure every row on this rank, all ranks together."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = TorchGroup(dist.new_group(backend="nccl"), cpu_group=dist.group.WORLD)
    bench = _Bench(group, device)
    for batch in BATCHES[1:2] if quick else BATCHES:
        bench.calls(batch)
    for batch in STEP_BATCHES[1:2] if quick else STEP_BATCHES:
        bench.steps(batch)
    return bench.rows


class _Bench:
    def __init__(self, group: TorchGroup, device: torch.device) -> None:
        self.rows: Rows = {}
        self._group, self._device = group, device
        self._root = group.ranks[0]
        self._dot = torch.zeros(1, device=device)
        self._one_shot = OneShotTransport(group)
        self._grouped = CoalescedTransport(group, group.process_group)
        self._direct = OwnCommunicator(group) if has_own_bindings() else None

    def _meet(self) -> None:
        dist.barrier(group=self._group.cpu_group)

    def _line_up(self) -> None:
        """Let all devices go on together, and not before the hosts have launched what follows."""
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        dist.all_reduce(self._dot, group=self._group.process_group)

    def _replays(self, calls: Mapping[str, Call], repeats: int) -> dict[str, list[float]]:
        """Microseconds by call and replay, each time the slowest rank's."""
        own = replays_us(calls, self._meet, self._line_up, repeats)
        samples = torch.tensor(list(own.values()), dtype=torch.float64)
        dist.all_reduce(samples, dist.ReduceOp.MAX, group=self._group.cpu_group)
        return dict(zip(own, samples.tolist(), strict=True))

    def _row(self, key: str, batch: int, us: float) -> None:
        self.rows.setdefault(key, {})[batch] = us

    def _tensors(self, count: int, batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.arange(batch, device=self._device) + self._group.rank_in_group for _ in range(count))

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, self._root, group=self._group.process_group)

    def calls(self, batch: int) -> None:
        """One tensor and three, in every way there is."""
        floor = torch.zeros(128, device=self._device)
        both: dict[str, Call] = {"floor": lambda: floor.add_(1)}
        for count in (1, 3):
            own = self._tensors(count, batch)
            packet = Packet("bench", describe(own), sum(tensor.nbytes for tensor in own))
            both[f"pg {count}"] = partial(self._broadcast, own)
            for name, transport in self._grouped_ways(count):
                transport.prepare(packet, own)
                both[f"{name} {count}"] = partial(transport.overwrite_, packet, own)
            for name, counting in (("one-shot", False), ("one-shot counting", True)):
                move, _ = self._one_shot.bind(packet, own, overwrite=True, count=counting)
                both[f"{name} {count}"] = partial(move, own)
        both |= self._direct_one_by_one(batch)
        there_and_back = self._ping_pong(batch)
        replays = self._replays({**both, **there_and_back, **self._signal(batch)}, CALLS_PER_GRAPH)
        for key, samples in replays.items():
            self._row(key, batch, statistics.median(samples) / (2 if key in there_and_back else 1))
        if batch == HOST_BATCH:
            for key, call in both.items():
                self._row(f"host {key}", batch, host_us(call, self._meet))

    def _grouped_ways(self, count: int) -> list[tuple[str, Any]]:
        ways: list[tuple[str, Any]] = [("grouped", self._grouped)] if count > 1 else []
        return ways + ([("nccl", DirectTransport(self._group, self._direct))] if self._direct else [])

    def _direct_one_by_one(self, batch: int) -> dict[str, Call]:
        if (direct := self._direct) is None:
            return {}
        own = self._tensors(3, batch)

        def call() -> None:
            stream = torch.cuda.current_stream()
            for tensor in own:
                direct.broadcast(tensor, stream)

        return {"nccl one by one 3": call}

    def _ping_pong(self, batch: int) -> dict[str, Call]:
        """Rank 0 to all, then the last rank to all: two ways."""
        if self._group.world_size != 2:
            return {}
        (own,) = self._tensors(1, batch)
        last = self._group.ranks[-1]

        def both_ways() -> None:
            dist.broadcast(own, self._root, group=self._group.process_group)
            dist.broadcast(own, last, group=self._group.process_group)

        back = OneShotTransport(self._group)
        channel = back.channel
        turned = replace(channel, rank=channel.world - 1 - channel.rank, inboxes=channel.inboxes[::-1])
        moves = []
        for transport in (OneShotTransport(self._group), OneShotTransport(self._group, channel=turned)):
            packet = Packet("bench", describe((own,)), own.nbytes)
            moves.append(transport.bind(packet, (own,), overwrite=True, count=False)[0])
        return {"pg ping-pong": both_ways, "one-shot ping-pong": lambda: [move((own,)) for move in moves]}

    def _signal(self, batch: int) -> dict[str, Call]:
        """torch's own symmetric memory: copy into the peer, then a signal."""
        import torch.distributed._symmetric_memory as symmetric

        if self._group.world_size != 2:
            return {}
        inbox = symmetric.empty(batch, dtype=torch.int64, device=self._device)
        handle = symmetric.rendezvous(inbox, self._group.process_group.group_name)
        (own,) = self._tensors(1, batch)
        theirs = handle.get_buffer(1, (batch,), torch.int64)

        def call() -> None:
            if self._group.rank_in_group == 0:
                theirs.copy_(own)
                handle.put_signal(dst_rank=1, channel=0)
                handle.wait_signal(src_rank=1, channel=1)
            else:
                handle.wait_signal(src_rank=0, channel=0)
                own.copy_(inbox)
                handle.put_signal(dst_rank=0, channel=1)

        return {"signal 1": call}

    def steps(self, batch: int) -> None:
        """The DSpark-shaped step, synced in every way. The ranks draw the same tokens, as they nearly always do."""
        step = Step(batch, self._device, seed=0)
        empty = torch.zeros(1, device=self._device)
        ways: dict[str, tuple[Sync, Draw | None]] = {
            "none": (lambda slug, tensors: None, None),
            "pg": (lambda slug, tensors: self._broadcast(tensors), None),
            "grouped": (_by_packet(self._grouped), None),
            "floor": (lambda slug, tensors: empty.add_(1), None),
            "one-shot": (_counted(self._one_shot), None),
            "one-shot draw": (_counted(self._one_shot), self._drawer(batch, synced=True)),
            "fast draw": (lambda slug, tensors: None, self._drawer(batch, synced=False)),
        }
        calls = {key: partial(step, sync, draw) for key, (sync, draw) in ways.items()}
        replays = self._replays(calls, STEPS_PER_GRAPH)
        self._row("step none", batch, statistics.median(replays["none"]))
        for key in ("pg", "grouped", "one-shot", "one-shot draw", "floor"):
            self._row(f"cost {key}", batch, median_difference(replays[key], replays["none"]))
        over = median_difference(replays["one-shot draw"], replays["fast draw"])
        self._row("cost over fast draw", batch, over)

    def _drawer(self, batch: int, synced: bool) -> Draw:
        """The fused draw; without sync it is the same kernel in a group of one rank."""
        logits_BV = torch.zeros(batch, VOCABULARY, dtype=torch.bfloat16, device=self._device)
        transport = self._one_shot
        if not synced:
            channel = replace(transport.channel, rank=0, world=1, inboxes=transport.channel.inboxes[:1])
            transport = OneShotTransport(self._group, channel=channel)
        fused, _ = transport.bind_draw("dspark-draft-greedy", "bench", logits_BV, noisy=False, count=True)

        def draw(logits_BV: Tensor) -> Tensor:
            tokens_B = logits_BV.new_empty(batch, dtype=torch.int64)
            fused(logits_BV, None, tokens_B)
            return tokens_B

        return draw


def median_difference(samples: Sequence[float], without: Sequence[float]) -> float:
    """The median of what each sample took longer than the one of the same turn."""
    return statistics.median(a - b for a, b in zip(samples, without, strict=True))


def _by_packet(transport: Any) -> Sync:
    packets: dict[tuple[str, str], Packet] = {}

    def sync(slug: str, tensors: Sequence[Tensor]) -> None:
        key = (slug, describe(tensors))
        if key not in packets:
            packets[key] = Packet(*key, sum(tensor.nbytes for tensor in tensors))
            transport.prepare(packets[key], tensors)
        transport.overwrite_(packets[key], tensors)

    return sync


def _counted(transport: OneShotTransport) -> Sync:
    moves: dict[tuple[str, str], Callable[[Sequence[Tensor]], None]] = {}

    def sync(slug: str, tensors: Sequence[Tensor]) -> None:
        key = (slug, describe(tensors))
        if key not in moves:
            packet = Packet(*key, sum(tensor.nbytes for tensor in tensors))
            moves[key] = transport.bind(packet, tensors, overwrite=True, count=True)[0]
        moves[key](tensors)

    return sync
