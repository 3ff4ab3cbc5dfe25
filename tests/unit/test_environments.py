"""What the doctor says of ranks that run on different software, hardware, plans or seeds."""

import random
import sys

import pytest
import torch

from specsync_core.diagnostics import Recorder, diagnose, facts, recording_path
from specsync_core.registry_files import builtin_registry, merge_registries

REGISTRY = merge_registries([builtin_registry()])
SAME = {"nccl": "2.30.7", "torch": "2.13.0", "driver": "550.1", "gpu": "H200", "plugin eagle": "specsync-core 1"}


def record(folder, monkeypatch, *versions, generators=None, digests=("d", "d")):
    """One recording a rank, each with values that agree."""
    for rank, own in enumerate(versions):
        monkeypatch.setattr(
            "specsync_core.diagnostics.recorder.generators", lambda rank=rank: (generators or [{}] * 9)[rank]
        )
        recorder = Recorder(
            recording_path(folder, rank), group_rank=rank, world_size=len(versions), ranks=range(len(versions)),
            plan_digest=digests[rank % 2], sites=REGISTRY.sites, slots=16, versions=own,
        )  # fmt: skip
        recorder.before(REGISTRY.site(11), [torch.tensor([1])], 0)
        recorder.after(REGISTRY.site(11), [torch.tensor([1])], 0)
        recorder.close()
    return diagnose(folder)


def test_alike_ranks_are_no_finding(tmp_path, monkeypatch):
    seeds = {"torch": {"seed": 1, "state": 5}}
    assert record(tmp_path, monkeypatch, SAME, SAME, generators=[seeds, seeds]).finding == "clean"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("nccl", "2.29.0", "nccl version: 2.30.7 on rank 0, 2.29.0 on rank 1"),
        ("torch", "2.12.0", "torch version: 2.13.0 on rank 0, 2.12.0 on rank 1"),
        ("driver", "560.0", "driver: 550.1 on rank 0, 560.0 on rank 1"),
        ("gpu", "H100", "gpu: H200 on rank 0, H100 on rank 1"),
        ("plugin eagle", None, "plugin eagle version: specsync-core 1 on rank 0, None on rank 1"),
    ],
)
def test_a_difference_is_a_finding(tmp_path, monkeypatch, name, value, said):
    found = record(tmp_path, monkeypatch, SAME, {**SAME, name: value})
    assert (found.finding, found.is_finding) == ("environment", True)
    assert found.headline == f"The ranks differ in their {said}. No divergence was seen: 0 mismatches in 1 comparison."


def test_plans_that_differ(tmp_path, monkeypatch):
    found = record(tmp_path, monkeypatch, SAME, SAME, digests=("d0", "d1"))
    assert found.headline.startswith("The ranks differ in their plan digest: d0 on rank 0, d1 on rank 1.")


def test_a_version_that_is_known_to_be_bad(tmp_path, monkeypatch):
    bad = {**SAME, "nccl": "2.28.9"}
    found = record(tmp_path, monkeypatch, bad, bad)
    assert found.finding == "environment"
    assert found.headline.startswith(
        "NCCL 2.28.9 is on the list of bad versions: hangs of this look came from it alone"
    )


@pytest.mark.parametrize(
    ("own", "is_finding", "said"),
    [
        (({"seed": 1}, {"seed": 2}), True, "generators have different seeds (draws from them differ): 1 on rank 0, 2"),
        (({"seed": 2**60}, {"seed": 2**61}), False, None),
        (({"seed": 1, "offset": 0}, {"seed": 1, "offset": 4}), True, "the same seed and another offset: one has drawn"),
        (({"seed": 1, "state": 7}, {"seed": 1, "state": 8}), True, "the same seed and another state"),
        (({"state": 7}, {"state": 8}), False, None),
    ],
)
def test_seeds_and_offsets(tmp_path, monkeypatch, own, is_finding, said):
    found = record(tmp_path, monkeypatch, SAME, SAME, generators=[{"torch": each} for each in own])
    assert found.is_finding == is_finding
    if said is not None:
        assert said in found.headline
    else:
        assert "generator" not in found.text, "worth a word only where something diverged"


def test_what_this_process_draws_from(monkeypatch):
    torch.manual_seed(11)
    random.seed(5)
    one = facts.generators()
    assert one == facts.generators(), "reading changes nothing"
    assert one["torch"]["seed"] == 11
    torch.rand(1)
    random.random()
    two = facts.generators()
    assert one["torch"]["state"] != two["torch"]["state"]
    assert one["python"] != two["python"]
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert set(facts.generators()) == {"python"}


def test_the_driver_is_read_where_there_is_one(tmp_path):
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12\n"
    (tmp_path / "version").write_text(text)
    assert facts._driver_version(str(tmp_path / "version")) == "550.54.15"
    assert facts._driver_version(str(tmp_path / "absent")) is None
