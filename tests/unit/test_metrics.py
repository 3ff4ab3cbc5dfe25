"""Counters in the page that an engine serves: real prometheus_client, several processes, also dead ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, multiprocess
from prometheus_client.samples import Sample

WORKER = """
import os, signal, sys
from dataclasses import replace
from types import SimpleNamespace

import torch
from specsync_core import Facts, ParallelGroups, SpecTpSync, load_registry, resolve_plan
from specsync_core.counters import SiteStats
from specsync_core.diagnostics import FaultInjector, parse_faults
from specsync_core.diagnostics import metrics as exporting

rank, end = int(sys.argv[1]), sys.argv[2]
exporting.INTERVAL_S = 3600

class Group:
    world_size, rank_in_group, ranks, cpu_group = 2, rank, [4, 5], None
    def broadcast(self, tensor, src=0):
        tensor.fill_(1)

registry = load_registry()
injector = FaultInjector(parse_faults("dspark-plan:rank=1:add=1", registry, "test"), rank, allowed=True)
plan = resolve_plan(registry, {"SPECSYNC_TRANSPORT": "group"}, facts=Facts(platform="cpu"))
sync = SpecTpSync(ParallelGroups(tp=Group()), plan, taps=[injector], handshake=False)
metrics = exporting.Metrics(sync)

def step():
    sync.next_step()
    sync.sync("dspark-plan", torch.tensor([1, 1], dtype=torch.int32))
    sync.sync("dspark-draft-greedy", torch.tensor([1, 1 + rank]))
    metrics.update()

step()  # told at once
step()
step()  # too early: nothing is read
if end == "plan":
    sync.plan = sync.plan.with_modes({"dspark-plan": "audit"}, "test")
if end != "kill":
    metrics.update(now=True)
print(plan.digest[:12], flush=True)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "stay":
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return tmp_path


def start(rank: int, end: str) -> subprocess.Popen[str]:
    """Start a worker, and wait until it has counted."""
    command = [sys.executable, "-W", "error", "-c", WORKER, str(rank), end]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    process.digest = process.stdout.readline().strip()  # type: ignore[attr-defined]
    assert process.digest  # type: ignore[attr-defined]
    return process


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.communicate(timeout=60)


def page() -> dict[tuple[str, ...], float]:
    """The page as an engine makes it: every sample by name and the values of its labels."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    samples: list[Sample] = [sample for metric in registry.collect() for sample in metric.samples]
    return {(sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value for sample in samples}


def test_every_workers_counts_are_on_one_page(folder):
    zero, one = start(0, "stay"), start(1, "stay")
    found = page()
    site = "tp-4", "1", "dspark-draft-greedy"
    assert found["specsync_calls_total", "tp-4", "0", "dspark-draft-greedy"] == 3
    assert found[("specsync_calls_total", *site)] == 3
    assert found[("specsync_bytes_total", *site)] == 3 * 16
    assert found[("specsync_compared_total", *site)] == 3 * 2
    assert found[("specsync_mismatches_total", *site)] == 3
    assert found[("specsync_mismatched_calls_total", *site)] == 3
    assert found["specsync_mismatches_total", "tp-4", "1", "dspark-plan"] == 6
    assert found["specsync_faults_total", "tp-4", "1", "dspark-plan"] == 3
    assert found["specsync_checks_total", "tp-4", "1"] == 12
    assert found["specsync_step", "tp-4", "0"] == found["specsync_step", "tp-4", "1"] == 3
    assert found["specsync_plan_info", one.digest, "tp-4", "1"] == 1  # type: ignore[attr-defined]
    assert ("specsync_faults_total", "tp-4", "0", "dspark-plan") not in found
    assert ("specsync_checks_total", "tp-4", "0") not in found  # it is what the others compare with
    finish(zero, one)


def test_counts_of_a_killed_worker_stay_and_its_step_goes(folder):
    killed, living = start(1, "kill"), start(0, "stay")
    assert killed.wait(60) == -signal.SIGKILL
    before = page()
    assert before["specsync_calls_total", "tp-4", "1", "dspark-plan"] == 1  # all that it had told
    multiprocess.mark_process_dead(killed.pid)  # as engines do for workers that they miss
    found = page()
    assert found["specsync_calls_total", "tp-4", "1", "dspark-plan"] == 1
    assert ("specsync_step", "tp-4", "1") not in found
    assert not any(name == "specsync_plan_info" and group_rank == "1" for name, *_, group_rank in found)
    assert found["specsync_step", "tp-4", "0"] == 3
    again = start(1, "stay")  # in its place: counters go on
    assert page()["specsync_calls_total", "tp-4", "1", "dspark-plan"] == 1 + 3
    finish(killed, living, again)


def test_a_worker_that_ends_tells_what_it_had_not_told(folder):
    finish(start(1, "end"))
    assert page()["specsync_calls_total", "tp-4", "1", "dspark-plan"] == 3


def test_another_plan_takes_the_place_of_the_first(folder):
    process = start(0, "plan")
    finish(process)
    found = {labels[1]: value for labels, value in page().items() if labels[0] == "specsync_plan_info"}
    assert len(found) == 2
    assert found.pop(process.digest) == 0  # type: ignore[attr-defined]
    assert list(found.values()) == [1]


def test_without_the_client_nothing_is_exported_and_nothing_fails(folder):
    hide = "import sys; sys.modules['prometheus_client'] = None\n"
    done = subprocess.run([sys.executable, "-c", hide + WORKER, "1", "end"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
