"""What a check of derived state hashes, whom it names, and in which words."""

import math

import pytest
import torch

from specsync_core import ParallelGroups, PayloadError, RegistryError, SpecTpSync
from specsync_core.checks import MOST_SHOWN, StateCheck, digest_of, numbers_of, odd_ones, outline


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([3, 4], dtype=torch.int32), torch.tensor([3, 4])),
        (torch.tensor([3, 4]), [3, 4]),
        (("decode", 8), ["decode", 8]),
        ({"bs": 8}, {"bs": 8}),
        (math.nan, math.nan),
    ],
)
def test_equal_content_has_one_hash(one, other):
    assert digest_of(one) == digest_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([3, 4], [4, 3]),
        ([3, 4], [3, 4, 0]),
        ([[3], [4]], [[3, 4]]),
        ("3", 3),
        (None, 0),
        (True, 1),
        ({"bs": 8}, {"bs": 16}),
    ],
)
def test_other_content_has_another(one, other):
    assert digest_of(one) != digest_of(other)


@pytest.mark.parametrize(("value", "hint"), [({1, 2}, "sorted"), (object(), "object"), ([b"x"], "bytes")])
def test_what_has_no_hash_says_so(value, hint):
    with pytest.raises(PayloadError, match=hint):
        digest_of(value)


def test_the_majority_names_the_odd_one():
    assert odd_ones(["a", "a", "b"]) == ((2,), True)
    assert odd_ones(["b", "a", "a"]) == ((0,), True)
    assert odd_ones(["a", "b"]) == ((1,), False)
    assert odd_ones(["a", "b", "c"]) == ((1, 2), False)
    assert odd_ones(["a", "a"]) == ((), False)


def test_what_ranks_show_each_other_is_bounded():
    assert outline([[1, 2], "x" * 500]) == [1, 2, "x" * 120, "3 elements"]
    assert len(outline(list(range(2 * MOST_SHOWN)))) == MOST_SHOWN + 1


def test_what_taps_see():
    assert numbers_of([1, 2]).tolist() == [1, 2]
    assert numbers_of(torch.tensor([1], dtype=torch.int32)).dtype == torch.int32
    assert numbers_of(["a"]) is None
    assert numbers_of([True]) is None
    assert numbers_of([2**70]) is None


def test_words():
    equal = StateCheck("state-seq-lens", 7, 1, world_size=3)
    assert equal
    assert equal.text == "state-seq-lens, step 7, call 1: equal on 3 ranks"
    odd = StateCheck("state-seq-lens", 7, 2, (2,), True, 4, {0: 117, 1: 117, 2: 118}, 3)
    assert not odd
    assert odd.text == (
        "state-seq-lens, step 7, call 2: group rank 2 is the odd one out of 3:"
        " element 4 is 118 on group rank 2, 117 on group ranks 0, 1"
    )
    two = StateCheck("state-request-ids", 7, 2, (1,), False, 0, {0: "r1", 1: "r2"}, 2)
    assert two.text == (
        "state-request-ids, step 7, call 2: element 0 is 'r2' on group rank 1, 'r1' on group rank 0"
        " (no majority: either may be wrong)"
    )
    hidden = StateCheck("state-graph-key", 7, 2, (1, 3), True, None, {0: "a", 1: "b", 2: "a", 3: "c", 4: "a"}, 5)
    assert "group ranks 1, 3 are the odd ones out of 5: the hash is" in hidden.text
    assert "nothing was compared" in StateCheck("state-graph-key", 7, 0).text


class Lone:
    world_size, rank_in_group, cpu_group = 1, 0, None

    def broadcast(self, tensor, src=0):
        raise AssertionError("a lone rank tells nobody")


def test_sites_of_other_kinds_are_refused():
    lone_sync = SpecTpSync(ParallelGroups(tp=Lone()))
    with pytest.raises(RegistryError, match="check takes check sites, such as state-seq-lens"):
        lone_sync.check("dspark-plan", [1])
    with pytest.raises(RegistryError, match="Use check"):
        lone_sync.sync("state-seq-lens", torch.tensor([1]))
    assert lone_sync.check("state-seq-lens", [1])
