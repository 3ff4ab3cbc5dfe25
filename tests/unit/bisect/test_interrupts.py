"""A bisection that is interrupted or killed leaves no process behind, and can be gone on with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specsync_core.bisect.processes import Interrupts
from tests.unit.bisect.oracles import A
from tests.unit.bisect.toy import processes_with, toy, wait_for


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "specsync_core.cli", "bisect", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What a shell runs in the background ignores Ctrl-C, and hands that on.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture
def asleep(tmp_path: Path, log: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A bisection whose run sleeps, with a child that ignores SIGTERM in its group, and one in a session of its own."""
    command = toy(tmp_path, [A], how="sleeps", stubborn=getattr(request, "param", False), log=log)
    process = start(tmp_path, "--sites", "dspark", "--", *command)
    try:
        wait_for((log / "asleep").exists, 60)
        wait_for(lambda: len(processes_with(str(tmp_path / "specsync-bisect.trials"))) >= 3)
        yield process
    finally:
        process.kill()
        process.wait()


def report(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "specsync-bisect.json").read_text())


def nothing_left(tmp_path: Path) -> bool:
    return not processes_with(str(tmp_path / "specsync-bisect.trials"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_run_and_saves(tmp_path: Path, asleep: subprocess.Popen[str], number: int) -> None:
    asleep.send_signal(number)
    _, err = asleep.communicate(timeout=60)
    assert asleep.returncode == 128 + number
    assert "interrupted; every run was ended. To go on: specsync bisect --resume\n" in err
    assert re.search(r"^\d\d:\d\d:\d\d ending the runs; Ctrl-C again does not wait$", err, re.MULTILINE)
    assert nothing_left(tmp_path)
    saved = report(tmp_path)
    assert saved["status"] == "interrupted"
    assert [trial["outcome"] for trial in saved["trials"]][-1] == "aborted"


@pytest.mark.parametrize("asleep", [True], indirect=True)
def test_a_second_signal_does_not_wait_for_a_stubborn_run(tmp_path: Path, asleep: subprocess.Popen[str]) -> None:
    asleep.send_signal(signal.SIGINT)
    time.sleep(0.3)
    asleep.send_signal(signal.SIGINT)
    asleep.communicate(timeout=60)
    assert asleep.returncode == 130
    assert nothing_left(tmp_path)
    assert report(tmp_path)["status"] == "interrupted"


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before_int = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGINT) == interrupts._note
        assert interrupts.count == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, before_int)


def test_the_way_on_names_the_report_wherever_it_is(tmp_path: Path, log: Path) -> None:
    (tmp_path / "an out").mkdir()
    command = toy(tmp_path, [A], how="sleeps", log=log)
    path = "an out/specsync-bisect.json"
    process = start(tmp_path, "--sites", "dspark", "--report", path, "--", *command)
    wait_for((log / "asleep").exists, 60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err.endswith(f"To go on: specsync bisect --resume --report '{path}'\n")


def test_killing_the_bisection_itself_ends_its_runs(tmp_path: Path, asleep: subprocess.Popen[str]) -> None:
    asleep.kill()
    asleep.communicate(timeout=60)
    wait_for(lambda: nothing_left(tmp_path))
    assert report(tmp_path)["status"] == "running"


def test_it_goes_on_where_it_was_interrupted(tmp_path: Path, log: Path) -> None:
    command = toy(tmp_path, [A], log=log)
    process = start(tmp_path, "--sites", "dspark", "--runs", "8", "--", *command)
    wait_for(lambda: len(list(log.iterdir())) >= 4, 60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    done = [trial for trial in report(tmp_path)["trials"] if trial["outcome"] != "aborted"]
    before = len(list(log.iterdir()))
    assert process.returncode == 130
    process = start(tmp_path, "--resume")
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 3  # --runs 8 is few
    assert f"With {A} off, " in out
    saved = report(tmp_path)
    assert saved["trials"][: len(done)] == done
    numbers = [trial["number"] for trial in saved["trials"]]
    assert len(set(numbers)) == len(numbers)
    assert len(list(log.iterdir())) == before + sum(t["number"] > before for t in saved["trials"])
    assert os.path.exists(tmp_path / "specsync-bisect.json")
