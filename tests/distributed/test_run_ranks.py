"""The helper itself: one failing, one hanging and one exiting rank each fail the test."""

import os
import time
from pathlib import Path

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


def meet_at_the_second_time(rank: int, folder: str, often: int) -> str:
    """Group rank 0 finds nobody to meet for the first so many times."""
    mark = Path(folder) / f"{rank}-{len(list(Path(folder).glob(f'{rank}-*')))}"
    mark.touch()
    turn = mark.name.partition("-")[2]
    closed = rank == 0 and int(turn) < often
    while closed and not (Path(folder) / f"1-{turn}").exists():  # else rank 1 might be ended before it has counted
        time.sleep(0.01)
    return "nowhere://" if closed else f"file://{folder}/store-{turn}"


def count_ranks(rank: int, world_size: int, folder: str, often: int) -> int:
    return dist.get_world_size()


def test_ranks_that_gloo_could_not_connect_are_started_once_more(tmp_path):
    def run(often: int) -> list[int]:
        (folder := tmp_path / str(often)).mkdir()
        return run_ranks(count_ranks, 2, args=(str(folder), often), setup=meet_at_the_second_time)

    assert run(1) == [2, 2]
    with pytest.raises(RankError, match=r"rank 0 failed:[\s\S]*init_process_group"):
        run(2)


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
