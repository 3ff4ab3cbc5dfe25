"""What tests/gpu run on the ranks: every function is called on all ranks together and returns what went wrong.

Rank r of the world runs on GPU r modulo the number of GPUs; groups are NCCL groups with a gloo group beside them.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.collectives import store_of
from specsync_core.errors import SpecSyncError
from specsync_core.payload import Packet, describe
from specsync_core.transports import choose_transport
from specsync_core.transports.base import CountingTransport
from specsync_core.transports.choose import TRANSPORTS
from specsync_core.transports.communicators import has_own_bindings
from specsync_core.transports.one_shot import OneShotTransport
from specsync_core.transports.one_shot_protocol import SLOTS
from tests.transport_conformance import conform, payloads, same, values

Found = list[str]


def device_of_rank(rank: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def run_checks(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, Found]:
    """Run checks one after the other; a check that raises has found its traceback. Stops there: peers may be stuck."""
    device = device_of_rank(rank)
    group = TorchGroup(dist.new_group(backend="nccl"), cpu_group=dist.group.WORLD)
    results: dict[str, Found] = {}
    for name in names:
        started = time.monotonic()
        try:
            results[name] = globals()[name](group, device)
            torch.cuda.synchronize()
        except Exception:
            results[name] = [traceback.format_exc()]
            break
        finally:
            print(f"rank {rank} {name} {time.monotonic() - started:.1f} s {results.get(name)}", flush=True)
        dist.barrier(group=group.cpu_group)
    return results


def packet_of(name: str, tensors: tuple[torch.Tensor, ...]) -> Packet:
    return Packet(name, describe(tensors), sum(tensor.nbytes for tensor in tensors))


def captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture a function that was called before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph


def eager_table(name: str) -> Callable[[TorchGroup, torch.device], Found]:
    return lambda group, device: conform(TRANSPORTS[name], group, device)


def captured_table(name: str) -> Callable[[TorchGroup, torch.device], Found]:
    """Every row of the table captured once and replayed with inputs that change."""

    def check(group: TorchGroup, device: torch.device) -> Found:
        found = []
        transport, rank = TRANSPORTS[name](group), group.rank_in_group
        for row, own in payloads(rank, device):
            packet = packet_of("captured", own)
            transport.prepare(packet, own)
            transport.overwrite_(packet, own)
            graph = captured(lambda p=packet, o=own: transport.overwrite_(p, o))
            for replay in range(3):
                fresh = dict(payloads(rank + 7 * replay, device))[row]
                right = dict(payloads(7 * replay, device))[row]
                for tensor, value in zip(own, fresh, strict=True):
                    tensor.copy_(value)
                graph.replay()
                if not same(own, right):
                    found.append(f"{row}, replay {replay}: not group rank 0's values")
        return found

    return check


one_shot_eager, grouped_eager, group_eager = map(eager_table, ("one-shot", "grouped", "group"))
one_shot_captured, grouped_captured, group_captured = map(captured_table, ("one-shot", "grouped", "group"))


def sizes(group: TorchGroup, device: torch.device) -> Found:
    """0 to 1e6 bytes and beyond what the ring holds, odd sizes and both sides of every boundary."""
    found = []
    for name, build in TRANSPORTS.items():
        transport = build(group)
        for size in (0, 1, 7, 8, 9, 1015, 1016, 1017, 8191, 32767, 32768, 32769, 65537, 1_000_000, 3_000_000):
            own, right = (values("uint8", (size,), seed, device) for seed in (group.rank_in_group, 0))
            packet = packet_of("sizes", (own,))
            transport.prepare(packet, (own,))
            transport.overwrite_(packet, (own,))
            if not torch.equal(own, right):
                found.append(f"{name}, {size} bytes: not group rank 0's values")
    return found


def many_tensors(group: TorchGroup, device: torch.device) -> Found:
    """Twelve tensors of mixed dtypes and odd sizes in one call."""
    found = []
    for name, build in TRANSPORTS.items():

        def make(seed: int) -> tuple[torch.Tensor, ...]:
            kinds = ("int64", "bool", "int32", "bfloat16", "float32", "uint8")
            return tuple(values(kinds[i % 6], (3 * i + 1,), seed + i, device) for i in range(12))

        transport, own = build(group), make(group.rank_in_group)
        packet = packet_of("many", own)
        transport.prepare(packet, own)
        transport.overwrite_(packet, own)
        if not same(own, make(0)):
            found.append(f"{name}: not group rank 0's values")
    return found


def interleaved(group: TorchGroup, device: torch.device) -> Found:
    """Two graphs of different sites, eager calls between, and a rank that replays where its peer runs eagerly."""
    found, rank = [], group.rank_in_group
    transport = OneShotTransport(group)
    sites = {
        name: (values("int64", (size,), rank, device), values("int32", (size,), rank, device))
        for name, size in (("draft", 8), ("accept", 6000), ("plan", 1))
    }
    packets = {name: packet_of(name, own) for name, own in sites.items()}
    for name, own in sites.items():
        transport.prepare(packets[name], own)
        transport.overwrite_(packets[name], own)
    eager = {name: (lambda n=name: transport.overwrite_(packets[n], sites[n])) for name in sites}
    graphs = {name: captured(eager[name]) for name in ("draft", "accept")}
    order = random.Random(0)
    for turn in range(300):
        name = order.choice(list(sites))
        replays = order.random() < 0.5
        if rank and order.random() < 0.5:  # the peer does the other thing
            replays = not replays
        for position, tensor in enumerate(sites[name]):
            tensor.fill_(turn * 10 + position + (1000 * rank))
        graphs[name].replay() if replays and name in graphs else eager[name]()
        for position, tensor in enumerate(sites[name]):
            if not bool((tensor == turn * 10 + position).all()):
                found.append(f"turn {turn}, {name}: not group rank 0's values")
        order.seed(turn)
    return found[:5]


def back_pressure(group: TorchGroup, device: torch.device) -> Found:
    """Group rank 0 runs far ahead of a peer that is seconds late; then the peer runs ahead of a late rank 0."""
    found, rank = [], group.rank_in_group
    transport = OneShotTransport(group)
    own = (torch.zeros(8, dtype=torch.int64, device=device),)
    packet = packet_of("pressure", own)
    transport.prepare(packet, own)
    for late in (1, 0):
        errors = torch.zeros((), dtype=torch.int64, device=device)
        if rank == late:
            time.sleep(2.5)
        for turn in range(20 * SLOTS):
            own[0].fill_(turn if rank == 0 else -1)
            transport.overwrite_(packet, own)
            errors += (own[0] != turn).sum()
        if int(errors):
            found.append(f"group rank {late} late: {int(errors)} wrong elements")
    return found


def stress(group: TorchGroup, device: torch.device) -> Found:
    """Two million captured calls with random delays on either side; a lost or repeated one shows as a wrong count."""
    rank, per_graph, replays = group.rank_in_group, 100, 20_000
    transport = OneShotTransport(group)
    own = (torch.zeros(24, dtype=torch.int64, device=device),)
    expected = torch.zeros(24, dtype=torch.int64, device=device)
    errors = torch.zeros(24, dtype=torch.int64, device=device)
    packet = packet_of("stress", own)
    transport.prepare(packet, own)

    def step() -> None:
        for _ in range(per_graph):
            expected.add_(1)
            own[0].add_(1) if rank == 0 else own[0].fill_(-1)
            transport.overwrite_(packet, own)
            errors.add_(own[0] != expected)

    step()
    graph = captured(step)
    delays = random.Random(rank)
    for turn in range(replays):
        if delays.random() < 0.05:
            torch.cuda._sleep(delays.randrange(1, 200_000))
        if delays.random() < 0.001:
            time.sleep(delays.random() * 0.02)
        graph.replay()
        if turn % 64 == 0:
            torch.cuda.current_stream().synchronize()
    total = int(expected[0])
    if total != per_graph * (replays + 1):
        return [f"{total} calls counted"]
    return [f"{int(errors.sum())} wrong elements in {total} calls"] if int(errors.sum()) else []


def counters(group: TorchGroup, device: torch.device) -> Found:
    return [text for name in ("one-shot", "grouped") for text in counters_of(name, group, device)]


def counters_of(transport: str, group: TorchGroup, device: torch.device) -> Found:
    """Mismatches, and the first of them, counted by the kernel: eagerly, in graphs, in both modes."""
    found, rank = [], group.rank_in_group
    sync = synced(group, "all,dspark-accept-sample:audit", transport)
    if not isinstance(sync.transports[transport].transport, CountingTransport):
        found.append(f"{transport} does not count by a kernel")
    sync.step = 4
    for slug in ("dspark-accept-greedy", "dspark-accept-sample"):
        own = tuple(torch.arange(70, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64, torch.int32))
        point = sync.point(slug)
        point(*own)
        graph = captured(lambda p=point, o=own: p(*o))
        sync.next_step()
        for _ in range(3):
            if rank:
                own[1][3:5] += 2**40
                own[2][69] = -1
            graph.replay()
            if rank and slug.endswith("sample"):
                own[1].copy_(torch.arange(70, device=device))
                own[2].copy_(torch.arange(70, device=device))
        torch.cuda.synchronize()
        stats = sync.stats()[slug]
        compared = (4 * 210, 9, 3) if rank else (0, 0, 0)
        if (stats.calls, stats.compared, stats.mismatches, stats.mismatched_calls) != (4, *compared):
            found.append(f"{transport}, {slug}: {stats}")
        first = stats.first_divergence
        if rank and (
            first is None
            or (first.call, first.tensor, first.index, first.own, first.rank0) != (2, "bonus", (3,), 2**40 + 3, 3)
        ):
            found.append(f"{slug}: {first}")
        if not rank and first is not None:
            found.append(f"{slug}: group rank 0 differs from itself: {first}")
        if first is not None and first.step != sync.step:
            found.append(f"{slug}: step {first.step}, not {sync.step}")
    return found


def synced(group: TorchGroup, policy: str, transport: str) -> SpecTpSync:
    environ = {"SPECSYNC_SITES": policy, "SPECSYNC_TRANSPORT": transport}
    plan = resolve_plan(load_registry(), environ=environ, facts=Facts(platform="cuda"))
    return SpecTpSync(ParallelGroups(tp=group), plan=plan)


def modes_and_transports(group: TorchGroup, device: torch.device) -> Found:
    found, rank = [], group.rank_in_group
    for transport in ("auto", "one-shot", "grouped", "group"):
        sync = synced(group, "all,dspark-accept-sample:audit", transport)
        if transport == "auto" and sync.transports["auto"].transport.name != "one-shot":
            found.append(f"auto took {sync.transports['auto']}")
        for slug, kept in (("dspark-accept-greedy", 0), ("dspark-accept-sample", rank)):
            own = tuple(torch.arange(6, device=device) + rank for _ in range(3))
            sync.sync(slug, *own)
            if any(tensor.tolist() != list(range(kept, kept + 6)) for tensor in own):
                found.append(f"{transport}, {slug}: {own}")
            stats = sync.stats()[slug]
            if (stats.calls, stats.mismatches) != (1, 18 * (rank > 0)):
                found.append(f"{transport}, {slug}: {stats}")
    return found


def auto_says_why(group: TorchGroup, device: torch.device) -> Found:
    """A transport that fails on one rank only is rejected on every rank, with the reason."""
    store = store_of(group.cpu_group)
    original = TRANSPORTS["one-shot"]

    def broken(group: Any) -> Any:
        transport = original(group)
        if group.rank_in_group == 1:
            transport.overwrite_ = lambda packet, tensors: None  # type: ignore[method-assign]
        return transport

    TRANSPORTS["one-shot"] = broken
    try:
        choice = choose_transport("auto", group, lambda topic, payload: store.exchange(topic, payload, 30))
    finally:
        TRANSPORTS["one-shot"] = original
    right = choice.transport.name == "grouped" and "group rank 1: wrong values in int64[5]" in choice.rejected[0][1]
    return [] if right else [str(choice)]


def one_stream(group: TorchGroup, device: torch.device) -> Found:
    """A replayed graph runs on one stream; with one-shot it is one chain of one kernel a call."""
    found = []
    for name in ("one-shot", "grouped"):
        transport = TRANSPORTS[name](group)
        own = tuple(values("int64", (8,), group.rank_in_group + i, device) for i in range(3))
        packet = packet_of("streams", own)
        transport.prepare(packet, own)
        transport.overwrite_(packet, own)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(3):
                own[0].add_(1)
                transport.overwrite_(packet, own)
        edges = edges_of(graph)
        graph.instantiate()
        graph.replay()
        if len(streams := streams_of(graph.replay)) != 1:
            found.append(f"{name}: the replay's kernels ran on the streams {streams}; {edges}; {kinds_of(graph)}")
        branches = [node for side in zip(*edges, strict=True) for node in side if side.count(node) > 1]
        if name == "one-shot" and (len(edges) != 5 or branches):
            found.append(f"{name}: not one chain of one kernel a call: {edges}")
    return found


def edges_of(graph: torch.cuda.CUDAGraph) -> list[tuple[int, int]]:
    """The edges between a captured graph's nodes."""
    from cuda.bindings import runtime

    handle = graph.raw_cuda_graph()
    counted = runtime.cudaGraphGetEdges(handle)
    listed = runtime.cudaGraphGetEdges(handle, counted[-1])
    return [(int(start), int(end)) for start, end in zip(listed[1], listed[2], strict=True)]


def kinds_of(graph: torch.cuda.CUDAGraph) -> list[str]:
    from cuda.bindings import runtime

    handle = graph.raw_cuda_graph()
    nodes = runtime.cudaGraphGetNodes(handle, runtime.cudaGraphGetNodes(handle)[-1])[1]
    return [f"{int(node)} {runtime.cudaGraphNodeGetType(node)[1].name}" for node in nodes]


def streams_of(call: Callable[[], Any]) -> set[int]:
    """The streams that a call's kernels ran on."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    return {event.device_resource_id() for event in events if event.device_type() == torch.autograd.DeviceType.CUDA}


def own_communicator(group: TorchGroup, device: torch.device) -> Found:
    """A group that brings no device process group gets a communicator through NVIDIA's bindings."""
    if not has_own_bindings():
        return []

    class Bare:
        world_size, rank_in_group, cpu_group = group.world_size, group.rank_in_group, group.cpu_group

        def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
            raise AssertionError("the communicator broadcasts")

    build = TRANSPORTS["grouped"]
    found = conform(build, Bare(), device)
    original, TRANSPORTS["grouped"] = TRANSPORTS["grouped"], lambda _: build(Bare())
    try:
        return found + captured_table("grouped")(group, device)
    finally:
        TRANSPORTS["grouped"] = original


def fused_draw(group: TorchGroup, device: torch.device) -> Found:
    """Equal to draw, then sync, bit for bit: ties, infinities, zeros of both signs, noise, dtypes, sizes; captured.

    Rows of float16 without noise lie apart, as those of a block's step do; 5000 rows are more than one launch takes.
    """
    found, rank = [], group.rank_in_group
    sync, plain = (synced(group, "all", transport) for transport in ("one-shot", "grouped"))
    for rows, vocabulary in ((1, 1), (1, 129_280), (3, 1000), (64, 32_000), (200, 77), (5, 8193), (5000, 64)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for noisy in (False, True):
                generator = torch.Generator(device).manual_seed(rank * 100 + rows)
                scores = torch.empty(rows, 2, vocabulary, dtype=dtype, device=device)[:, 1]
                if noisy or dtype != torch.float16:
                    scores = scores.contiguous()
                noise = torch.empty(rows, vocabulary, device=device) if noisy else None
                out = torch.empty(rows, dtype=torch.int64, device=device)

                def fill(turn: int, s=scores, n=noise, g=generator) -> None:
                    s.copy_(
                        torch.rand(s.shape, generator=g, device=device)
                        if n is not None
                        else torch.randint(-3, 3, s.shape, generator=g, device=device)
                    )
                    if turn == 1:
                        s[:, ::2] = -0.0
                    if turn == 2:
                        s[0] = float("-inf") if n is None else 0.0
                    if n is not None:
                        n.exponential_(generator=g).clamp_(min=1e-20)

                graph = None
                for turn in range(4):
                    fill(turn)
                    right = plain.draw("dspark-draft-sample", scores, noise)
                    mine = sync.draw("dspark-draft-sample", scores, noise, out=out)
                    if not torch.equal(mine, right) or mine is not out:
                        found.append(f"{rows} x {vocabulary} {dtype} noisy={noisy} turn {turn}: {mine[:3]} {right[:3]}")
                    if graph is None:
                        graph = captured(lambda s=scores, n=noise, o=out: sync.draw("dspark-draft-sample", s, n, out=o))
                    out.fill_(-1)
                    graph.replay()
                    if not torch.equal(out, right):
                        found.append(f"{rows} x {vocabulary} {dtype} noisy={noisy} turn {turn}: replayed {out[:3]}")
    stats = sync.stats()["dspark-draft-sample"]
    first = stats.first_divergence
    if rank and (stats.mismatches == 0 or first is None or first.tensor != "draft_tokens"):
        found.append(f"{stats}")
    return found[:6]


def subgroup(rank: int, world_size: int) -> dict[str, Found]:
    """Three processes, two GPUs: a group whose rank 0 is global rank 1."""
    device = torch.device("cuda", (rank - 1) % 2)
    torch.cuda.set_device(device)
    nccl, gloo = dist.new_group([1, 2], backend="nccl"), dist.new_group([1, 2], backend="gloo")
    if rank == 0:
        return {}
    group = TorchGroup(nccl, cpu_group=gloo)
    return {
        name: conform(build, group, device) + captured_table(name)(group, device) for name, build in TRANSPORTS.items()
    }


def caught(function: Callable[[], Any], meet: Callable[[], Any] = lambda: None) -> tuple[str, float]:
    """Call, wait for the device, meet, call again: a failure on the device is raised by the next call."""
    started = time.monotonic()
    try:
        function()
        torch.cuda.synchronize()
        meet()
        function()
        torch.cuda.synchronize()
        function()
    except SpecSyncError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "nothing", time.monotonic() - started


def expect(found: Found, group: TorchGroup, result: tuple[str, float], parts: tuple[str, ...], most_s: float) -> None:
    message, seconds = result
    if not all(part in message for part in parts) or seconds > most_s:
        found.append(f"group rank {group.rank_in_group} after {seconds:.1f} s: {message}")


def alive(device: torch.device) -> None:
    assert int(torch.ones(4, device=device).sum()) == 4


def mismatched_call(group: TorchGroup, device: torch.device) -> Found:
    """Another site, another size, other dtypes of one size: both sides report both calls, and neither hangs."""
    found, rank = [], group.rank_in_group
    calls = (
        (("draft", 8, "int64"), ("plan", 8, "int64"), "plan with int64[8], where group rank 0 sent draft with"),
        (("plan", 8, "int64"), ("plan", 9, "int64"), "plan with int64[9], where group rank 0 sent plan with"),
        (("plan", 5000, "int64"), ("plan", 1, "int64"), "plan with int64[1], where group rank 0 sent plan with"),
        (("plan", 8, "int64"), ("plan", 16, "int32"), "plan with int32[16], where group rank 0 sent plan with"),
    )
    for *sides, text in calls:
        transport = OneShotTransport(group, wait_s=5)
        name, size, dtype = sides[rank > 0]
        own = (values(dtype, (size,), rank, device),)
        before = own[0].clone()
        for other, other_size, other_dtype in sides:  # both ranks know both sites
            transport.prepare(
                packet_of(other, (values(other_dtype, (other_size,), 0, device),)),
                (values(other_dtype, (other_size,), 0, device),),
            )
        packet = packet_of(name, own)
        transport.prepare(packet, own)

        result = caught(
            lambda t=transport, p=packet, o=own: t.overwrite_(p, o), meet=lambda: dist.barrier(group=group.cpu_group)
        )
        expect(found, group, result, ("PayloadError", "do not match: group rank 1", text), 10)
        if not torch.equal(own[0], before):
            found.append(f"{text}: tensors were changed")
        alive(device)
    return found


def root_never_comes(group: TorchGroup, device: torch.device) -> Found:
    found, rank = [], group.rank_in_group
    transport = OneShotTransport(group, wait_s=1)
    own = (values("int64", (8,), rank, device),)
    packet = packet_of("plan", own)
    transport.prepare(packet, own)
    if rank == 0:
        time.sleep(4)
    result = caught(lambda: transport.overwrite_(packet, own))
    expect(found, group, result, ("TransportError", "group rank 1", "waited in vain for chunk 0 from group rank 0"), 4)
    alive(device)
    return found


def peer_never_comes(group: TorchGroup, device: torch.device) -> Found:
    found, rank = [], group.rank_in_group
    transport = OneShotTransport(group, wait_s=1)
    own = (values("int64", (8,), rank, device),)
    packet = packet_of("plan", own)
    transport.prepare(packet, own)
    if rank:
        time.sleep(4)
        result = caught(lambda: transport.overwrite_(packet, own))
    else:
        result = caught(lambda: [transport.overwrite_(packet, own) for _ in range(SLOTS + 1)])
    expect(found, group, result, ("TransportError", "group rank 0", "could not send chunk", "group rank 1 is"), 4)
    alive(device)
    return found


def host_halts_it(group: TorchGroup, device: torch.device) -> Found:
    """A kernel that waits for a peer ends when its own host says so, long before its time is up; nothing is taken."""
    found, rank = [], group.rank_in_group
    elsewhere = torch._C._cuda_hasPrimaryContext(0)
    for halted in (0, 1):
        transport = OneShotTransport(group, wait_s=60)
        own = (values("int64", (8,), rank, device),)
        before = own[0].clone()
        packet = packet_of("plan", own)
        transport.prepare(packet, own)
        if rank == halted:
            calls = SLOTS + 1 if rank == 0 else 1  # group rank 0 waits when the ring is full
            timer = threading.Timer(1, transport.halt)
            timer.start()
            result = caught(lambda t=transport, p=packet, o=own, n=calls: [t.overwrite_(p, o) for _ in range(n)])
            timer.join()
            expect(found, group, result, ("TransportError", "a rank of the group has ended or gave up"), 10)
            if not torch.equal(own[0], before):
                found.append(f"halted, group rank {rank} changed its tensor")
        dist.barrier(group=group.cpu_group)
        alive(device)
    # The thread that halts was on no device yet: it must not make a context on the first, which is another rank's.
    if rank and not elsewhere and torch._C._cuda_hasPrimaryContext(0):
        found.append(f"group rank {rank} has made a context on device 0")
    return found
