"""The host side of one-shot: headers, failure records in words, and where a differing lane is."""

from types import SimpleNamespace

import pytest
import torch

from specsync_core.errors import PayloadError, TransportError
from specsync_core.transports import one_shot_protocol as protocol
from specsync_core.transports.one_shot import decode_lane
from specsync_core.transports.one_shot_channel import explain, obstacle
from specsync_core.transports.one_shot_draw import draw_then, find_draw_problem
from specsync_core.transports.one_shot_protocol import Failure, Header, chunks_of, lanes_of

DRAFT = Header.of("dspark-draft-greedy", "int64[8]", 64)
PLAN = Header.of("dspark-plan", "int32[8]", 32)
KNOWN = {DRAFT.word: "dspark-draft-greedy with int64[8]", PLAN.word: "dspark-plan with int32[8]"}


def test_the_protocol_s_constants_fit_each_other():
    assert protocol.SLOTS & (protocol.SLOTS - 1) == 0
    assert protocol.SLOTS == 32  # the kernel's assembly and its clearing rule count on it
    assert protocol.ACK_EVERY < protocol.SLOTS
    assert protocol.SLOTS % protocol.ACK_EVERY == 0
    assert protocol.SLOTS * protocol.CLEAR_ROUNDS < protocol.TAG_BIT
    assert protocol.ACKS + protocol.MAX_WORLD * protocol.LINE_BYTES <= protocol.DETAILS
    assert protocol.DETAILS + protocol.MAX_WORLD * protocol.DETAIL_BYTES <= protocol.RING


def test_a_header_survives_its_word_and_tells_site_size_and_dtype_apart():
    for header in (DRAFT, PLAN, Header(0xFFFFFFFF, 0xFFFFFF, 0xFF)):
        assert -(2**63) <= header.word < 2**63
        assert Header.from_word(header.word) == header
    assert Header.of("dspark-plan", "int64[4]", 32) != PLAN
    assert DRAFT.nbytes == 64


def failure(kind: int, own: Header, theirs: Header) -> Failure:
    code = kind | 1 << 8 | 70_000 << 32
    return Failure.from_words(code, own.word & 2**64 - 1, theirs.word & 2**64 - 1)


def test_a_mismatch_names_both_calls_on_both_sides():
    found = failure(protocol.MISMATCH, PLAN, DRAFT)
    for rank, who in ((0, "group rank 1"), (1, "group rank 1 (this rank)")):
        error = explain(found, rank, KNOWN)
        assert isinstance(error, PayloadError)
        assert str(error).startswith(
            f"one-shot: the ranks' calls do not match: {who} came to chunk 70000 with dspark-plan with int32[8], where"
            " group rank 0 sent dspark-draft-greedy with int64[8]."
        )


def test_a_size_that_this_rank_never_prepared_is_named_by_site_and_bytes():
    other = Header.of("dspark-plan", "int32[9]", 36)
    error = explain(failure(protocol.MISMATCH, PLAN, other), 1, KNOWN)
    assert "group rank 0 sent dspark-plan with 36 bytes" in str(error)
    alien = Header.of("toy", "int32[9]", 36)
    assert "a site unknown to this rank (crc32 " in str(explain(failure(protocol.MISMATCH, PLAN, alien), 1, KNOWN))


def test_time_outs_name_who_waited_for_whom():
    error = explain(failure(protocol.NO_ROOT, PLAN, Header(0, 0, 0)), 0, KNOWN)
    assert isinstance(error, TransportError)
    assert "group rank 1 waited in vain for chunk 70000 from group rank 0, at dspark-plan with int32[8]" in str(error)
    error = explain(failure(protocol.PEER_BEHIND, PLAN, Header(3, 0, 0)), 1, KNOWN)
    assert "could not send chunk 70000 of dspark-plan with int32[8]: group rank 3 is 32 chunks behind" in str(error)


@pytest.mark.parametrize(
    ("dtype", "shape", "index"),
    [
        (torch.int64, (4,), (2,)),
        (torch.int32, (3, 5), (2, 4)),
        (torch.bool, (13,), (11,)),
        (torch.bfloat16, (2, 7), (1, 6)),
        (torch.float32, (), ()),
        (torch.complex64, (3,), (1,)),
    ],
)
def test_a_differing_lane_leads_back_to_its_element(dtype, shape, index):
    before = torch.zeros(5, dtype=torch.int16)
    own, root = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    own[index] = 1
    lanes = list(zip(words(own), words(root), strict=True))
    lane = next(place for place, (mine, theirs) in enumerate(lanes) if mine != theirs)
    shapes = [(tensor.shape, tensor.dtype) for tensor in (before, own)]
    position, found, values = decode_lane(lanes_of(before.nbytes) + lane, *lanes[lane], shapes)
    assert (position, found) == (1, index)
    assert values == ((1, 0) if not dtype.is_complex else ("(1+0j)", "0j"))


def words(tensor: torch.Tensor) -> list[int]:
    """A tensor's lanes as the kernel sees them."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    padded = data.ljust(lanes_of(len(data)) * 8, b"\0")
    return [int.from_bytes(padded[start : start + 8], "little") for start in range(0, len(padded), 8)]


def test_chunks():
    assert [chunks_of(lanes) for lanes in (0, 1, 4096, 4097)] == [1, 1, 1, 2]


def test_obstacles_are_named():
    assert obstacle(SimpleNamespace(world_size=2), torch.device("cpu")) == "it needs CUDA tensors"


def test_what_cannot_be_drawn_from_is_refused():
    scores = torch.zeros(2, 3)
    assert find_draw_problem(scores, None) is None
    assert find_draw_problem(scores, torch.ones(2, 3)) is None
    wanted = "must be float32, bfloat16 or float16 [B, V]"
    assert f"{wanted}, not torch.int64 [2, 3]" in find_draw_problem(scores.long(), None)
    assert "not torch.float32 [3]" in find_draw_problem(torch.zeros(3), None)
    assert "not 0" in find_draw_problem(torch.zeros(2, 0), None)
    assert "noise must be float32 [2, 3]" in find_draw_problem(scores, torch.ones(2, 4))
    assert find_draw_problem(scores, None, torch.zeros(2, dtype=torch.int64)) is None
    wanted = "out must be int64 [2], contiguous, on cpu, not"
    assert f"{wanted} torch.int32 [2] on cpu" in find_draw_problem(scores, None, torch.zeros(2, dtype=torch.int32))
    assert f"{wanted} torch.int64 [3] on cpu" in find_draw_problem(scores, None, torch.zeros(3, dtype=torch.int64))
    strided = torch.zeros(4, dtype=torch.int64)[::2]
    assert f"{wanted} torch.int64 [2] on cpu, strided" in find_draw_problem(scores, None, strided)


def test_a_draw_without_a_device_is_argmax():
    scores = torch.tensor([[1.0, 4.0, 4.0], [3.0, 2.0, 1.0]])
    assert draw_then(scores, None).tolist() == [1, 0]
    assert draw_then(scores, torch.tensor([[0.1, 1.0, 1.0], [1.0, 0.1, 1.0]])).tolist() == [0, 1]
