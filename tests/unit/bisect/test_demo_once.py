"""``specsync demo --once``: one run, the environment's policy, an exit code. No rank is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from specsync_core.cli import main
from specsync_core.demo.config import Job, JobResult
from specsync_core.demo.once import digest
from specsync_core.demo.options import Setup
from specsync_core.demo.runner import Ended

Run = Callable[..., tuple[int, str, str]]
SAME, OTHER = {0: [1, 2], 1: [3]}, {0: [1, 2], 1: [4]}


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The policies of the runs that were made; with every site off, ranks differ."""
    made: list[str] = []

    def run_once(setup: Setup, sites: str, working: Any) -> Ended:
        made.append(sites)
        ranks = {rank: JobResult(OTHER if rank and sites == "off" else SAME, [0.1], 1.0) for rank in (0, 1)}
        return Ended(Job("once", "dspark", sites, 1), ranks, None, None)

    monkeypatch.setattr("specsync_core.demo.once.run_once", run_once)
    return made


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], policies: list[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["demo", *arguments])
        return (int(caught.value.code or 0), *capsys.readouterr())

    return run


def test_equal_ranks_end_well(run: Run, policies: list[str]) -> None:
    code, out, err = run("--once")
    assert (code, out) == (0, f"tokens {digest(SAME)}\n")
    assert err.startswith("It finished. All ranks' tokens are identical")
    assert policies == ["all"]


def test_ranks_that_differ_are_a_failure(run: Run) -> None:
    code, out, err = run("--once", "--sites", "off")
    assert (code, out) == (1, f"tokens {digest(SAME)}\n")
    assert "All ranks' tokens are" in err


def test_the_environments_policy_comes_first(run: Run, policies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_SITES", "off")
    assert run("--once", "--sites", "all")[0] == 1
    assert policies == ["off"]


def test_under_bisect_it_goes_without_saying(run: Run, policies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_TRIAL", "3")
    code, out, _ = run("--json")
    assert code == 0
    assert json.loads(out)["tokens"] == digest(SAME)
    assert policies == ["all"]


def test_the_digest_tells_tokens_apart() -> None:
    assert digest(SAME) == digest({1: [3], 0: [1, 2]})
    assert len({digest(each) for each in (SAME, OTHER, {}, {0: [12], 1: [3]})}) == 4
