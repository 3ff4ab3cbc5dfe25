"""Counts on the device with plain torch operations: captured, replayed with other values, read beside the stream."""

import math

import pytest
import torch

from specsync_core.counters import SiteCounter
from specsync_core.device_counts import DeviceCounts, StepClock, requests_of
from specsync_core.diagnostics.facts import generators
from specsync_core.payload import Packet
from specsync_core.registry_files import builtin_registry, merge_registries
from specsync_core.sync import beside_the_stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ACCEPT = merge_registries([builtin_registry()]).site("dspark-accept-greedy")


def triple():
    return tuple(torch.arange(4, device="cuda", dtype=dtype) for dtype in (torch.int32, torch.int64, torch.int32))


def captured(function):
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        function()
    return graph


def test_a_graph_counts_each_replay_and_keeps_the_first_difference_with_its_gap():
    clock = StepClock()
    counter = SiteCounter(ACCEPT, "sync", group_rank=1)
    packet, own, rank0 = Packet(ACCEPT.slug, "", 64), triple(), triple()
    logits_BSV = torch.zeros(4, 2, 8, device="cuda")
    logits_BSV[..., 1] = torch.tensor([[4.0, 4.0], [3.0, 0.25], [2.0, 2.0], [1.0, 1.0]], device="cuda")
    logits_BSV[0, 1] = math.nan  # behind a plan
    counter.prepare(packet, own, clock)

    def call():
        counter.count(packet, own, rank0, 0)
        counter.note_gap(packet, own, logits_BSV)

    call()
    graph = captured(call)
    for step in range(1, 5):
        clock.set(step)
        if step == 3:
            own[1][1:3] += 2**40
        graph.replay()
        own[1].copy_(rank0[1])  # as a sync heals it
    stats = counter.stats()
    assert (stats.calls, stats.compared, stats.mismatches, stats.mismatched_calls) == (5, 60, 2, 1)
    first = stats.first_divergence
    assert first is not None
    assert (first.step, first.call, first.tensor, first.index) == (3, 4, "bonus", (1,))
    assert (first.own, first.rank0, first.logit_gap) == (2**40 + 1, 1, 0.25)


def test_counts_are_read_while_the_stream_is_stuck():
    counts, [own] = DeviceCounts(torch.device("cuda"), StepClock()), [triple()]
    packet = Packet(ACCEPT.slug, "", 64)
    counts.prepare(packet, own, compares=True)
    counts.count(packet, own, triple())
    torch.cuda.synchronize()
    torch.cuda._sleep(6_000_000_000)  # some seconds of the device's clock
    behind = torch.cuda.Event()
    behind.record()
    with beside_the_stream():
        totals, first = counts.read()
    assert not behind.query(), "the stream was still busy when the counts had been read"
    assert (totals[0], totals[2], first) == (1, 12, None)
    torch.cuda.synchronize()
    assert len(requests_of(ACCEPT, [(tensor.shape, tensor.dtype) for tensor in own])) == 12


def test_the_devices_generator_tells_its_seed_and_its_offset():
    torch.cuda.manual_seed(11)
    before = generators(0)["cuda"]
    torch.rand(1, device="cuda")
    after = generators(0)["cuda"]
    assert (before["seed"], before["offset"], after["seed"]) == (11, 0, 11)
    assert 0 < after["offset"] < 1000
