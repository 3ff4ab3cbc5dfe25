import math

import pytest
import torch

from specsync_core.counters import SiteCounter, SiteStats, summary
from specsync_core.device_counts import DeviceCounts, StepClock, bits, requests_of
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


def test_a_count_says_how_much_was_compared_and_nothing_is_never_clean():
    assert SiteStats("audit", compared=61_440).text == "0 mismatches in 61,440 checks"
    assert SiteStats("audit", compared=1, mismatches=1).text == "1 mismatch in 1 check"
    assert SiteStats("audit", calls=9).text == "nothing was compared here"
    assert summary([SiteStats("sync", compared=40), SiteStats("sync", compared=2, mismatches=2)]) == (
        "2 mismatches in 42 checks"
    )


# --- on a device: the same torch operations, here on the CPU ------------------------------------------


def device_counter(*signatures):
    """Counts as a device keeps them, with a packet for each signature."""
    counts = DeviceCounts(torch.device("cpu"), clock := StepClock())
    packets = []
    for tensors in signatures:
        packets.append(Packet("toy-accept", "", sum(tensor.nbytes for tensor in tensors)))
        counts.prepare(packets[-1], tensors, compares=True)
    return counts, clock, packets


def test_a_device_counts_what_the_host_counts():
    counts, clock, [packet] = device_counter(pair())
    for step in range(3):
        clock.set(step)
        own, rank0 = pair(), pair()
        if step:
            own[1][1, 2:] = step
        counts.count(packet, own, rank0)
    totals, first = counts.read()
    assert totals == [3, 3 * packet.nbytes, 30, 4, 2]
    assert first == (1, 2, 1, (1, 2), 1.0, 0.0)


def test_a_device_knows_which_signature_differed_first():
    small = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4)
    counts, _, [large_packet, small_packet] = device_counter(pair(), small)
    counts.count(large_packet, pair(), pair())
    own = torch.tensor([7], dtype=torch.int32), torch.zeros(1, 4)
    counts.count(small_packet, own, small)
    counts.count(large_packet, (torch.tensor([5, 5], dtype=torch.int32), torch.ones(2, 4)), pair())
    _, first = counts.read()
    assert first == (0, 2, 0, (0,), 7, 0)


def test_a_device_compares_nothing_on_the_root_and_in_empty_tensors():
    empty = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 4)
    counts, _, [packet] = device_counter(empty)
    counts.count(packet, empty, empty)
    counts.count(packet, empty, None)
    assert counts.read() == ([2, 0, 0, 0, 0], None)


@pytest.mark.parametrize(
    ("dtype", "mine", "theirs"),
    [
        (torch.bool, True, False),
        (torch.int8, -3, 4),
        (torch.int64, -(2**40), 2**40),
        (torch.bfloat16, 1.5, -0.0),
        (torch.float64, 1e300, math.inf),
    ],
)
def test_a_device_keeps_values_of_every_width(dtype, mine, theirs):
    own, rank0 = (torch.tensor([[0, 0], [0, value]], dtype=dtype) for value in (mine, theirs))
    counts, _, [packet] = device_counter((own,))
    counts.count(packet, (own,), (rank0,))
    assert counts.read()[1] == (0, 1, 0, (1, 1), mine, theirs)


# --- how close it was ---------------------------------------------------------------------------------

LOGITS = torch.tensor([[[9.0, 1.0, 0.0], [8.0, 7.5, 1.0]], [[3.0, 2.0, 0.0], [4.0, 3.75, math.nan]]])
"""[B, S, V]: the gaps are 8 and 0.5, and 1 (a row with NaN, behind a plan, counts for nothing)."""


@pytest.mark.parametrize("logits", [LOGITS, LOGITS.flatten(0, 1)], ids=["BSV", "NV"])
@pytest.mark.parametrize(("request_index", "gap"), [(0, 0.5), (1, 1.0)])
def test_the_first_difference_knows_how_close_its_request_was(logits, request_index, gap):
    host = SiteCounter(SITE, "sync", group_rank=1)
    counts, _, [packet] = device_counter(pair())
    note = counts.gap_note(requests_of(SITE, [(tensor.shape, tensor.dtype) for tensor in pair()]))
    for step, row in enumerate((None, request_index, 1 - request_index)):
        own, rank0 = pair(), pair()
        if row is not None:
            own[1][row, 3] = 1
        host.count(packet, own, rank0, step)
        counts.count(packet, own, rank0)
        host.note_gap(packet, own, logits)
        note.note(logits)
    first = host.stats().first_divergence
    assert first is not None
    assert (first.step, first.logit_gap, note.read()) == (1, gap, gap)


def test_without_logits_nothing_is_said_about_the_gap():
    counter = SiteCounter(SITE, "sync", 1)
    own, rank0 = pair(), pair()
    own[0][0] = 9
    counter.count(PACKET, own, rank0, 0)
    first = counter.stats().first_divergence
    assert first is not None
    assert first.logit_gap is None
    counts, _, _ = device_counter(pair())
    assert counts.gap_note([0] * 10).read() is None
