"""The demo's worlds of processes: what a divergence really does to ranks, and that none of them is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from specsync_core.demo.config import Job
from specsync_core.demo.options import Options, prepare
from specsync_core.demo.runner import Ended, Runner
from specsync_core.diagnostics import diagnose

COMMAND = [sys.executable, "-m", "specsync_core.cli", "demo"]


def job(name: str, sites: str, fault: str = "", temperature: float = 0.0, steps: int = 24) -> Job:
    return Job(name, "dspark", sites, steps, temperature, fault)


JOBS = {
    each.name: each
    for each in (
        job("hang", "off", "dspark-accept-greedy:rank=1:step=3:add=1"),
        job("abort", "off", "dspark-plan:rank=1:from=3:set=1"),
        job("death", "off", "dspark-plan:rank=1:step=3:exit=7"),
        job("silent", "off", "dspark-accept-greedy:rank=1:step=2:tensor=bonus:add=1", steps=4),
        job("unfaulted", "all"),
        job("healed", "all", "dspark-accept-greedy:rank=1:step=3:add=1"),
        job("too narrow", "all,-dspark-accept-greedy", "dspark-accept-greedy:rank=1:step=3:add=1"),
        job("natural", "all", temperature=1.0, steps=12),
        job("natural init", "init", temperature=1.0),
    )
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    runner = Runner(prepare(Options()), tmp_path_factory.mktemp("recordings"), lambda *_: None)
    return {end.job.name: end for end in runner.run(list(JOBS.values()))}


class TestDivergence:
    def test_a_longer_accept_ends_in_mismatched_collectives_that_hang(self, ends: dict[str, Ended]) -> None:
        """The picture of SG #33289: one rank in a forward's collective, its peer at the request broadcast."""
        end = ends["hang"]
        assert end.stop is not None
        assert end.stop.how == "hang"
        found = end.diagnosis
        assert found is not None
        assert (found.site, found.step, found.group_rank, found.tensor) == ("dspark-accept-greedy", 3, 1, "correct_len")
        assert found.own == found.rank0 + 1  # type: ignore[operator]
        assert found.waits[0].what == "tp all-reduce"
        assert found.waits[1].what == "request broadcast"

    def test_a_shorter_plan_ends_a_rank_and_is_diagnosed_as_well(self, ends: dict[str, Ended]) -> None:
        end = ends["abort"]
        assert end.stop is not None
        assert end.stop.how == "ended"
        assert -signal.SIGABRT in end.stop.exit_codes.values()
        assert end.diagnosis is not None
        assert (end.diagnosis.site, end.diagnosis.step) == ("dspark-plan", 3)
        assert any("Received data size" in line for line in end.lines())

    def test_a_rank_that_exits_is_named(self, ends: dict[str, Ended]) -> None:
        end = ends["death"]
        assert end.stop is not None
        assert end.stop.exit_codes[1] == 7
        assert end.diagnosis is not None
        assert end.diagnosis.dead_ranks == (1,)

    def test_other_tokens_of_equal_length_are_silent_and_still_found(self, ends: dict[str, Ended]) -> None:
        end = ends["silent"]
        assert end.stop is None
        assert not end.equal
        assert end.diagnosis is not None
        assert (end.diagnosis.finding, end.diagnosis.site) == ("silent-divergence", "dspark-accept-greedy")

    def test_sync_heals_the_same_fault(self, ends: dict[str, Ended]) -> None:
        assert ends["unfaulted"].equal
        assert ends["healed"].equal
        assert ends["healed"].tokens == ends["unfaulted"].tokens
        assert ends["healed"].healed["dspark-accept-greedy"] == 4, "one value per running request"
        assert "dspark-accept-greedy" not in ends["unfaulted"].healed

    def test_a_policy_without_the_site_does_not(self, ends: dict[str, Ended]) -> None:
        assert ends["too narrow"].stop is not None
        assert ends["too narrow"].diagnosis is not None
        assert ends["too narrow"].diagnosis.site == "dspark-accept-greedy"

    def test_generators_of_their_own_make_ranks_differ(self, ends: dict[str, Ended]) -> None:
        assert ends["natural"].equal
        assert sum(ends["natural"].healed.values()) > 20
        narrow = ends["natural init"]
        assert narrow.stop is not None or not narrow.equal
        assert narrow.diagnosis is not None
        assert narrow.diagnosis.is_finding
        assert narrow.diagnosis.site == "dspark-target"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary files, and whose processes, can be told from all others."""
    return {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "120"}


def processes_of(tmp_path: Path) -> list[int]:
    """Living processes, zombies aside, that were started with this directory for temporary files."""
    mark, found = f"TMPDIR={tmp_path}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition: object, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class TestCommand:
    def test_the_default_story_as_json(self, environment: dict[str, str], tmp_path: Path) -> None:
        done = subprocess.run([*COMMAND, "--json"], env=environment, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        story = json.loads(done.stdout)
        assert story["held"] is True
        off, on, natural = (story["parts"][key] for key in ("sync_off", "sync_on", "natural"))
        assert (off["outcome"], off["diagnosis"]["site"], off["diagnosis"]["step"]) == (
            "hung",
            "dspark-accept-greedy",
            8,
        )
        assert on["ranks_equal"]
        assert on["equals_unfaulted"]
        assert on["equals_plain"]
        assert on["healed"] == {"dspark-accept-greedy": 4}
        assert natural["all"]["ranks_equal"]
        assert natural["init"]["diagnosis"]["is_finding"]
        assert [row["transport"] for row in story["parts"]["cost"]["rows"]] == ["-", "grouped", "group"]
        assert story["samples"][0]["prompt"].startswith("Alice was beginning")
        assert list(tmp_path.iterdir()) == []

    def test_a_narrow_policy_is_a_finding(self, environment: dict[str, str]) -> None:
        options = ["--algorithm", "dflash", "--temperature", "1", "--sites", "init", "--steps", "12", "--fault", "none"]
        done = subprocess.run([*COMMAND, *options], env=environment, capture_output=True, text=True, timeout=110)
        assert done.returncode == 1, done.stderr
        assert "(b) Sync on (init), no injected fault, temperature 1  [DID NOT HOLD]" in done.stdout
        assert "First divergence: dflash-target, step 0" in done.stdout
        assert "--sites leaves these off, so nothing heals them: dflash-selector" in done.stdout
        assert "The story did NOT hold" in done.stdout

    def test_what_is_kept_is_what_the_doctor_reads(self, environment: dict[str, str], tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        changes = {"SPECSYNC_DUMP_DIR": str(kept), "SPECSYNC_FAULTS": "dspark-plan:rank=0:drop"}
        options = ["--once", "--sites", "off", "--steps", "16"]
        command = [*COMMAND, *options]
        done = subprocess.run(command, env=environment | changes, capture_output=True, text=True, timeout=110)
        assert done.returncode == 1, done.stderr
        (run,) = kept.iterdir()
        assert f"Read them yourself: specsync doctor {run}\n" in done.stderr
        assert "the demo does not read SPECSYNC_FAULTS; its faults are given by --fault." in done.stderr
        found = diagnose(run)
        assert (found.finding, found.site, found.step) == ("drift-hang", "dspark-accept-greedy", 8)
        assert "Rank 0's main thread, at " in found.text, "each rank wrote a dump while it hung"
        assert "Rank 1's main thread, at " in found.text
        assert found.headline.endswith(", and the ranks hung, and are gone now.")

    def test_bad_input_is_usage_and_starts_nothing(self, environment: dict[str, str], tmp_path: Path) -> None:
        done = subprocess.run([*COMMAND, "--ranks", "3"], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "--ranks: 3 ranks cannot share 8 attention heads equally" in done.stderr
        assert "Traceback" not in done.stderr
        assert processes_of(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
class TestEnds:
    @pytest.fixture
    def running(self, environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A demo whose ranks are at work, in a process group of its own as a terminal would have it."""
        demo = subprocess.Popen(
            COMMAND,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # What a shell runs in the background ignores Ctrl-C, and hands that on.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        try:
            wait_until(lambda: list(tmp_path.glob("specsync-demo-*/sync off/*")), 60, "the ranks did not start")
            yield demo
        finally:
            demo.kill()
            demo.wait()

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
    def test_no_process_and_no_file_is_left(
        self, number: signal.Signals, code: int, running: subprocess.Popen[bytes], tmp_path: Path
    ) -> None:
        assert len(processes_of(tmp_path)) >= 3
        if number == signal.SIGINT:
            os.killpg(running.pid, number)
        else:
            running.send_signal(number)
        assert running.wait(30) == code
        wait_until(lambda: not processes_of(tmp_path), 20, f"still there: {processes_of(tmp_path)}")
        assert list(tmp_path.iterdir()) == []
