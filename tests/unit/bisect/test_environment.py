"""The two variables that a run gets beside its policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsync_core.errors import PolicyError
from specsync_core.settings import read_environment, stats_directory, trial_number


def test_the_directory_of_counts_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert stats_directory({"SPECSYNC_STATS_DIR": "here"}) == tmp_path / "here"
    assert read_environment({"SPECSYNC_STATS_DIR": "here"}).stats_dir == tmp_path / "here"
    assert stats_directory({}) is None
    assert stats_directory({"SPECSYNC_STATS_DIR": ""}) is None
    with pytest.raises(PolicyError, match="SPECSYNC_STATS_DIR: takes a directory, not ''"):
        read_environment({"SPECSYNC_STATS_DIR": ""})


def test_the_number_of_a_run() -> None:
    assert trial_number({"SPECSYNC_TRIAL": "7"}) == "7"
    assert trial_number({}) is None


def test_a_typo_is_told() -> None:
    with pytest.raises(
        PolicyError, match=r"unknown variable SPECSYNC_STATS_DIRR \(did you mean SPECSYNC_STATS_DIR\?\)"
    ):
        read_environment({"SPECSYNC_STATS_DIRR": "x"})
