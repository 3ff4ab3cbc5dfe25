"""What counts as a hang: a rank that stays in a collective which its peer did not enter, while the engine lives."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.engines.sglang import serving

IN_STEP = "all_reduce float32 [4, 64]\nbroadcast int64 [1]\n"
WAITS = IN_STEP + "all_reduce float32 [8, 64]"
ELSEWHERE = IN_STEP + "broadcast int64 [1]\n"


@pytest.fixture
def engine():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    serving.end_session(process)


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(serving, "LIMIT_S", 2.0)


def write(folder, *traces, seconds_ago=60.0):
    for rank, text in enumerate(traces):
        path = folder / f"rank-{rank}"
        path.write_text(text)
        os.utime(path, (time.time() - seconds_ago,) * 2)


def test_ranks_that_enter_the_same_collectives_have_not_parted(tmp_path):
    write(tmp_path, IN_STEP, IN_STEP)
    assert serving.where_ranks_part(tmp_path) is None


def test_a_rank_that_is_behind_has_not_parted(tmp_path):
    write(tmp_path, WAITS, IN_STEP)
    assert serving.where_ranks_part(tmp_path) is None


def test_the_first_collective_that_differs_is_named(tmp_path):
    write(tmp_path, WAITS, ELSEWHERE)
    parted = "collective 3 is all_reduce float32 [8, 64] on rank 0, and broadcast int64 [1] on rank 1"
    assert serving.where_ranks_part(tmp_path) == parted


def test_a_rank_that_waits_alone_for_long_is_a_hang(tmp_path, engine):
    write(tmp_path, WAITS, ELSEWHERE)
    assert serving.watch(engine, tmp_path) == "hung"


@pytest.mark.parametrize(
    ("traces", "seconds_ago"),
    [((WAITS, ELSEWHERE), 0.0), ((WAITS, WAITS), 60.0), ((IN_STEP, ELSEWHERE), 60.0), ((), 60.0)],
    ids=["waits not for long", "in the same collective", "in no collective", "before the first"],
)
def test_what_is_no_proof_is_no_hang(tmp_path, engine, traces, seconds_ago):
    write(tmp_path, *traces, seconds_ago=seconds_ago)
    assert serving.watch(engine, tmp_path) == "late"


def test_an_engine_that_ended_did_not_hang(tmp_path, engine):
    engine.kill()
    engine.wait()
    write(tmp_path, WAITS, ELSEWHERE)
    assert serving.watch(engine, tmp_path) == "finished"
