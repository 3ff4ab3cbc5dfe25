"""The helper itself: one failing, one hanging and one exiting rank each fail the test."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from specsync_core.testing import RankError, run_ranks


def sum_of_ranks(rank: int, world_size: int, start: int) -> torch.Tensor:
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return value


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")
    time.sleep(60)


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def exit_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def test_every_ranks_value_comes_back_in_order():
    assert [value.item() for value in run_ranks(sum_of_ranks, 2, args=(10,))] == [21, 21]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (fail_on_one, r"rank 1 failed:[\s\S]*rank one has had enough"),
        (hang_on_one, r"ranks \[1\] of 2 did not finish within 1 s"),
        (exit_on_one, r"rank 1 exited with code 7"),
    ],
)
def test_one_bad_rank_fails_the_caller_and_ends_the_peers(fn, message):
    started = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(fn, 2, timeout_s=1)
    assert time.monotonic() - started < 45, "the sleeping peers were not ended"
