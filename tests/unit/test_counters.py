import math

import torch

from specsync_core.counters import SiteCounter, bits
from specsync_core.payload import Packet
from specsync_core.registry import Site, TensorSpec

SITE = Site(
    number=1000,
    slug="toy-accept",
    algorithm="toy",
    phase="accept",
    kind="broadcast",
    cause="float",
    tensors=(
        TensorSpec(name="lens", shape=("B",), dtypes=("int32",)),
        TensorSpec(name="scores", shape=("B", "D"), dtypes=("float32",)),
    ),
    graph=False,
    platforms=("cpu",),
    summary="a test's site",
)
PACKET = Packet("toy-accept", "", 40)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(2, dtype=torch.int32), torch.zeros(2, 4)


def test_counts_calls_bytes_elements_and_keeps_the_first_difference():
    counter = SiteCounter(SITE, "sync", group_rank=1)
    counter.count(PACKET, pair(), pair(), step=0)
    for step in (4, 5):
        own, rank0 = pair(), pair()
        own[1][1, 2] = step
        own[1][1, 3] = step
        counter.count(PACKET, own, rank0, step)
    stats = counter.stats()
    assert (stats.calls, stats.bytes, stats.compared) == (3, 120, 30)
    assert (stats.mismatches, stats.mismatched_calls) == (4, 2)
    first = stats.first_divergence
    assert first is not None
    assert (first.step, first.call, first.group_rank, first.tensor, first.index) == (4, 2, 1, "scores", (1, 2))
    assert (first.own, first.rank0) == (4.0, 0.0)


def test_the_root_and_uncompared_calls_compare_nothing():
    root, peer = SiteCounter(SITE, "sync", 0), SiteCounter(SITE, "sync", 1)
    root.count(PACKET, pair(), pair(), 0)
    peer.count(PACKET, pair(), None, 0)
    assert (root.stats().calls, root.stats().compared) == (1, 0)
    assert (peer.stats().calls, peer.stats().compared) == (1, 0)


def test_equal_nans_are_equal_and_negative_zero_is_not_zero():
    counter = SiteCounter(SITE, "audit", 1)
    own, rank0 = pair(), pair()
    own[1][0, 0] = rank0[1][0, 0] = math.nan
    counter.count(PACKET, own, rank0, 0)
    assert counter.stats().mismatches == 0
    own[1][0, 1] = math.nan
    counter.count(PACKET, own, rank0, 0)
    assert counter.stats().mismatches == 1


def test_every_dtype_has_bits():
    for dtype in (
        torch.bool,
        torch.int8,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ):
        assert not bits(torch.zeros(3).to(dtype)).is_floating_point()


def test_agreements_are_counted():
    counter = SiteCounter(SITE, "sync", 1)
    counter.count_value(3.5, 3.5, step=0)
    counter.count_value(3.5, 2.0, step=1)
    stats = counter.stats()
    assert (stats.calls, stats.compared, stats.mismatches) == (2, 2, 1)
    assert stats.first_divergence is not None
    assert (stats.first_divergence.own, stats.first_divergence.rank0) == (3.5, 2.0)
    assert stats.as_dict()["first_divergence"]["step"] == 1


def test_complex_elements_count_once_and_empty_tensors_not_at_all():
    counter = SiteCounter(SITE, "audit", 1)
    own, rank0 = pair(), pair()
    mine = torch.zeros(2, 4, dtype=torch.complex64)
    theirs = mine.clone()
    theirs[1, 3] = 1 + 1j
    counter.count(PACKET, (own[0], mine), (rank0[0], theirs), 0)
    assert counter.stats().mismatches == 1
    empty = torch.zeros(0, dtype=torch.int32)
    counter.count_ragged((empty, own[1][:0]), (empty, rank0[1][:0]), 0)
    assert counter.stats().mismatches == 1
