"""The one-shot kernel under Triton's interpreter: every rank in one process, one launch after the other.

Run as a program by `test_one_shot_kernel`, with ``TRITON_INTERPRET=1`` in its environment before Triton is imported.
A wait that would spin gives up at once here, so that an order of launches in which a rank waits shows as a failure.
"""

from __future__ import annotations

import random
import sys

import torch
import triton.language as tl

from specsync_core.payload import describe
from specsync_core.transports import one_shot_kernel as kernels
from specsync_core.transports import one_shot_protocol as protocol
from specsync_core.transports.count_kernel import count_kernel
from specsync_core.transports.one_shot import decode_lane
from specsync_core.transports.one_shot_channel import Channel
from specsync_core.transports.one_shot_draw_kernel import draw_kernel
from specsync_core.transports.one_shot_protocol import Failure, Header, lanes_of
from specsync_core.transports.one_shot_words import INTERPRETED

assert INTERPRETED.value, "set TRITON_INTERPRET=1"
OVERWRITE, COMPARE_ONLY, FETCH = 0, 1, 2


class Rank:
    """One rank's memory, and its launches."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.inbox = torch.zeros(protocol.INBOX_BYTES, dtype=torch.uint8)
        self.state = torch.zeros(1, dtype=torch.int64)
        self.record = torch.zeros(protocol.RECORD_WORDS, dtype=torch.int64)
        self.stats = torch.zeros(protocol.STATS_WORDS, dtype=torch.int64)
        self.inboxes: tuple[int, ...] = ()

    def _memory(self) -> tuple[object, ...]:
        return self.inboxes, self.state.data_ptr(), self.stats.data_ptr(), self.record.data_ptr(), 1000

    def call(self, slug, tensors, mode=OVERWRITE, targets=None, block=128, count=True):
        nbytes = sum(tensor.nbytes for tensor in tensors)
        widths = tuple(tensor.element_size() for tensor in tensors)
        lanes = sum(lanes_of(tensor.nbytes) for tensor in tensors)
        kernels.sync_kernel[(1,)](
            tuple(tensor.data_ptr() for tensor in tensors), tuple(tensor.data_ptr() for tensor in targets or tensors),
            tuple(tensor.nbytes for tensor in tensors), Header.of(slug, describe(tensors), nbytes).word,
            lanes, *self._memory(),
            widths=widths, RANK=self.rank, WORLD=self.world, BLOCK=block, UNIT=min(8, *widths), MODE=mode, COUNT=count,
            ONE_TILE=lanes + (self.rank == 0) <= block,
        )  # fmt: skip

    def draw(self, scores, noise, out):
        rows, vocabulary = scores.shape
        cells = torch.full((rows,), -(1 << 63), dtype=torch.int64)
        ticket = torch.zeros(1, dtype=torch.int32)
        draw_kernel[(rows, -(-vocabulary // 16), 1)](
            scores.data_ptr(), 0 if noise is None else noise.data_ptr(), out.data_ptr(), scores.stride(0), vocabulary,
            rows, cells.data_ptr(), ticket.data_ptr(), Header.of("draw", describe((scores,)), rows * 8).word,
            *self._memory(),
            RANK=self.rank, WORLD=self.world, BLOCK=128, COUNT=True,
            SCORE=tl.float32, NOISY=noise is not None, SPAN=16, ROWS=1 << (rows - 1).bit_length(),
        )  # fmt: skip
        assert cells.tolist() == [-(1 << 63)] * rows
        assert ticket.item() == 0

    @property
    def failure(self) -> Failure | None:
        code, own, theirs = (word & 2**64 - 1 for word in self.record[:3].tolist())
        return Failure.from_words(code, own, theirs) if code else None


def group(world: int, sequence: int = 0) -> list[Rank]:
    """The ranks of a group that has already exchanged ``sequence`` chunks."""
    ranks = [Rank(rank, world) for rank in range(world)]
    for rank in ranks:
        rank.inboxes = tuple(other.inbox.data_ptr() for other in ranks)
        rank.state.fill_(sequence)
        for other in range(world):
            start = protocol.ACKS + other * protocol.LINE_BYTES
            rank.inbox[start : start + 8].view(torch.int64).fill_(sequence & 0xFFFFFFFF)
    return ranks


def payload(rank: int, turn: int) -> tuple[torch.Tensor, ...]:
    count = torch.arange(5 + turn % 3)
    return (
        count * 2**33 + rank * (count % 2) + turn,
        (count[:3] + rank).to(torch.int32),
        (count + rank + turn) % 2 == 0,
        torch.tensor([rank / 3, 8.0 if rank else 2.0, 1.0]).to(torch.bfloat16),  # the second: only in its high byte
        count[:0],
    )


def equal(left, right) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(left, right, strict=True))


def test_every_order_of_launches_delivers(world: int) -> None:
    """Any order in which each rank's launches stay in order, group rank 0 ahead by at most the ring, works."""
    order, ranks, turns = random.Random(world), group(world), 80
    done, sent = [0] * world, [payload(0, turn) for turn in range(turns)]
    while min(done) < turns:
        acked = [count // protocol.ACK_EVERY * protocol.ACK_EVERY for count in done[1:]]
        ready = [rank for rank in range(1, world) if done[rank] < done[0]]
        if done[0] < turns and done[0] - min(acked) < protocol.SLOTS:
            ready += [0] * world
        rank = order.choice(ready)
        own = payload(rank, done[rank])
        ranks[rank].call(f"site-{done[rank] % 3}", own)
        assert ranks[rank].failure is None, (done, rank, ranks[rank].failure)
        assert equal(own, sent[done[rank]]), (done, rank)
        done[rank] += 1
    assert [int(rank.stats[protocol.CALLS]) for rank in ranks] == [turns] * world


def test_counts_and_first_difference(world: int) -> None:
    ranks = group(world)
    for mode in (COMPARE_ONLY, OVERWRITE):
        for rank in ranks:
            own, before = payload(rank.rank, 0), payload(rank.rank, 0)
            rank.call("site", own, mode)
            assert equal(own, payload(0, 0) if mode == OVERWRITE else before)
    for rank in ranks[1:]:
        own, root = payload(rank.rank, 0), payload(0, 0)
        different = sum(int((mine != theirs).sum()) for mine, theirs in zip(own, root, strict=True))
        assert rank.stats[: protocol.FIRST_CALL].tolist() == [2, 2 * different, 2], rank.stats
        first, mine, theirs = (
            int(rank.stats[word]) & 2**64 - 1 for word in (protocol.FIRST_LANE, protocol.FIRST_OWN, protocol.FIRST_ROOT)
        )
        shapes = [(tensor.shape, tensor.dtype) for tensor in own]
        position, index, values = decode_lane(first - 1, mine, theirs, shapes)
        assert values == (own[position][index].item(), root[position][index].item())
        assert int(rank.stats[protocol.FIRST_CALL]) == 1
    assert ranks[0].stats[protocol.MISMATCHES] == 0


def count_call(own, rank0, stats, record, *, overwrite, compare=True, block=32):
    widths = tuple(tensor.element_size() for tensor in own)
    addresses = [tuple(tensor.data_ptr() for tensor in tensors) for tensors in (own, rank0)]
    sizes = tuple(tensor.nbytes for tensor in own)
    count_kernel[(1,)](
        *addresses, sizes, sum(map(lanes_of, sizes)), stats.data_ptr(), record.data_ptr(),
        widths=widths, BLOCK=block, UNIT=min(8, *widths), OVERWRITE=overwrite, COMPARE=compare,
    )  # fmt: skip


def test_the_counting_kernel_of_grouped(world: int) -> None:
    """Compared, counted and overwritten in one launch, over several tiles; the first difference is kept."""
    rank = world - 1
    stats = torch.zeros(protocol.STATS_WORDS, dtype=torch.int64)
    record = torch.zeros(protocol.RECORD_WORDS, dtype=torch.int64)
    record[protocol.RECORD_STEP] = 7
    root = (*payload(0, 0), torch.arange(300, dtype=torch.int16))
    own = (*payload(rank, 0), torch.arange(300, dtype=torch.int16))
    own[-1][299] = -1
    different = sum(int((mine != theirs).sum()) for mine, theirs in zip(own, root, strict=True))
    before = [tensor.clone() for tensor in own]
    count_call(own, root, stats, record, overwrite=False)
    assert equal(own, before)
    count_call(own, root, stats, record, overwrite=True)
    assert equal(own, root)
    count_call(own, root, stats, record, overwrite=True)
    count_call(own, own, stats, record, overwrite=False, compare=False)
    assert stats[: protocol.FIRST_CALL].tolist() == [4, 2 * different, 2], stats
    shapes = [(tensor.shape, tensor.dtype) for tensor in own]
    first, mine, theirs = (
        int(stats[word]) & 2**64 - 1 for word in (protocol.FIRST_LANE, protocol.FIRST_OWN, protocol.FIRST_ROOT)
    )
    position, index, values = decode_lane(first - 1, mine, theirs, shapes)
    assert values == (before[position][index].item(), root[position][index].item())
    assert (int(stats[protocol.FIRST_CALL]), int(stats[protocol.FIRST_STEP])) == (1, 7)


def test_a_chunk_of_several_tiles(world: int) -> None:
    """In every mode, counting and not, among chunks of other sizes, and where the sequence wraps."""
    lanes = (31, 32, 33, 100, protocol.SLOT_LANES + 5)
    for start in (0, (1 << 31) - 2):
        ranks, turn = group(world, start), 0
        for mode in (OVERWRITE, COMPARE_ONLY, FETCH):
            for count in (True, False):
                for size in lanes:
                    turn += 1
                    for rank in ranks:
                        own = (torch.arange(size) * (1 + rank.rank) + turn,)
                        target, before = (torch.zeros(size, dtype=torch.int64),), own[0].clone()
                        targets = target if mode == FETCH else None
                        rank.call("tiles", own, mode, targets, 32 if size <= 100 else 2048, count)
                        assert rank.failure is None
                        agreed = torch.arange(size) + turn
                        assert torch.equal(own[0], agreed if mode == OVERWRITE else before), (size, mode, rank.rank)
                        assert mode != FETCH or not rank.rank or torch.equal(target[0], agreed), (size, rank.rank)
        for rank in ranks:
            chunks = 6 * (len(lanes) + 1)
            assert (int(rank.state) - start) % (1 << 32) == chunks, (int(rank.state), start)
            different = 3 * sum(size - 1 for size in lanes) if rank.rank else 0
            assert rank.stats[:3].tolist() == [turn, different, 3 * len(lanes) if rank.rank else 0]


def test_large_calls_take_several_chunks(world: int) -> None:
    ranks = group(world, sequence=2**31 - 5)  # tags come again on the way
    for size in (8 * protocol.SLOT_LANES, 3 * 8 * protocol.SLOT_LANES + 5, 0):
        sent = torch.arange(size, dtype=torch.uint8) if size < 256 else torch.randint(256, (size,), dtype=torch.uint8)
        for rank in ranks:
            own = (sent.clone() if rank.rank == 0 else torch.zeros(size, dtype=torch.uint8),)
            target = (torch.full((size,), 7, dtype=torch.uint8),)
            rank.call("large", own, FETCH, target, block=4096)
            assert rank.failure is None
            if rank.rank:
                assert torch.equal(target[0], sent)
                assert not own[0].any()


def test_a_mismatch_is_known_on_every_rank(world: int) -> None:
    ranks = group(world)
    own = [payload(rank, 0) for rank in range(world)]
    ranks[0].call("draft", own[0])
    ranks[1].call("plan", own[1])
    assert equal(own[1], payload(1, 0))
    for rank in ranks[2:]:
        rank.call("draft", own[rank.rank])
    ranks[0].call("draft", own[0])
    label = describe(own[0])
    nbytes = sum(tensor.nbytes for tensor in own[0])
    for rank in ranks:
        assert rank.failure == Failure(
            protocol.MISMATCH, 1, 0, Header.of("plan", label, nbytes), Header.of("draft", label, nbytes)
        ), rank.failure


def test_a_root_that_does_not_come(world: int) -> None:
    ranks = group(world)
    for rank in (*ranks[1:], ranks[0]):
        rank.call("plan", payload(rank.rank, 0))
    header = Header.of("plan", describe(payload(0, 0)), sum(tensor.nbytes for tensor in payload(0, 0)))
    assert {rank.failure for rank in ranks} == {Failure(protocol.NO_ROOT, 1, 0, header, Header(0, 0, 0))}


def test_a_peer_that_does_not_come(world: int) -> None:
    ranks = group(world)
    for turn in range(protocol.SLOTS + 1):
        for rank in ranks[:-1]:
            rank.call("plan", payload(rank.rank, 0))
            if turn < protocol.SLOTS:
                assert rank.failure is None
    ranks[-1].call("plan", payload(1, 0))
    for rank in ranks:
        assert rank.failure is not None
        if world == 2:
            found = rank.failure
            assert (found.kind, found.group_rank, found.theirs.site) == (protocol.PEER_BEHIND, 0, 1)


def test_a_rank_whose_host_halts_it_waits_no_more(world: int) -> None:
    """A peer waits for group rank 0, and group rank 0 for a full ring: halted, both go on with their own values."""
    for halted in (0, 1):
        ranks = group(world)  # all of them: group rank 0 writes into its peers' memory
        rank = ranks[halted]
        channel = Channel(halted, world, rank.inbox, rank.inboxes, rank.state, rank.record)
        for turn in range(protocol.SLOTS if halted == 0 else 0):
            rank.call("halt", payload(0, turn))
        assert channel.failure() is None
        channel.halt()
        own = payload(halted, 99)
        rank.call("halt", own)
        assert equal(own, payload(halted, 99))
        failure = channel.failure()
        assert failure is not None
        assert (failure.kind, failure.group_rank) == (protocol.HALTED, halted), failure
        assert "ended or gave up" in str(channel.error())


def test_a_slot_is_cleared_before_its_tags_come_again(world: int) -> None:
    last = protocol.SLOTS * protocol.CLEAR_ROUNDS - 1
    ranks = group(world, sequence=last)
    for rank in ranks:
        rank.call("plan", payload(rank.rank, 0))
    slot = protocol.RING + last % protocol.SLOTS * protocol.SLOT_BYTES
    for rank in ranks[1:]:
        assert not rank.inbox[slot : slot + protocol.SLOT_BYTES].any()
        assert rank.failure is None


def test_draws(world: int) -> None:
    ranks = group(world)
    for rows, vocabulary in ((1, 1), (3, 70)):
        for noisy in (False, True):
            generator = torch.Generator().manual_seed(rows)
            scores = torch.randint(-3, 3, (rows, vocabulary), generator=generator).float().abs_()
            scores[:, ::3] = -0.0
            noise = torch.rand(rows, vocabulary, generator=generator) + 0.1 if noisy else None
            right = (scores if noise is None else scores / noise).argmax(dim=-1)
            for rank in ranks:
                out = torch.full((rows,), -1)
                mine = scores if rank.rank == 0 else torch.rand(rows, vocabulary)
                if rank.rank == 0 and not noisy:  # rows of a block of drafts: something else lies between them
                    mine = torch.stack((torch.full_like(scores, 9.0), scores), 1)[:, 1]
                    assert rows == 1 or not mine.is_contiguous()
                rank.draw(mine, noise, out)
                assert torch.equal(out, right), (rank.rank, out, right)


if __name__ == "__main__":
    checks = [check for name, check in list(globals().items()) if name.startswith("test_")]
    for world in map(int, sys.argv[1:]):
        for check in checks:
            check(world)
            print(f"{check.__name__} with {world} ranks", flush=True)
