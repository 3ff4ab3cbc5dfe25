"""docs/bisect.md says what the code does, and what was measured."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.bisect_trials import DEMO, _written, table
from specsync_core.bisect import judge, search
from specsync_core.bisect.chances import share
from specsync_core.bisect.report import DEFAULT_PATH
from specsync_core.cli import bisect as command
from specsync_core.settings import VARIABLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bisect.md").read_text()
(RESULTS,) = (ROOT / "benchmarks" / "results").glob("bisect-trials-*.json")


def between(mark: str) -> str:
    return re.split(rf"<!-- {mark}: (?:begin|end) -->", PAGE)[1].strip()


def test_the_table_is_the_measured_one():
    assert between("table") == table(json.loads(RESULTS.read_text()))


def test_the_results_hold_what_was_asked_for():
    results = json.loads(RESULTS.read_text())
    assert RESULTS.read_text() == _written(results)
    assert set(results["threads"]) == set(results["simulated"]) == set(results["demo"]) == set(DEMO)
    for name, entry in results["threads"].items():
        assert len(results["simulated"][name]["runs"]) == 100, name
        assert len(set(entry["seeds"])) == 100, name
        assert len(entry["bisect"]["runs"]) == len(entry["plain halving"]["runs"]) == 100, name
        for done in (entry["bisect"], results["simulated"][name]):
            assert len(done["wrong"]) <= 0.05 * len(done["runs"]), name
        assert results["demo"][name]["right"], name


@pytest.mark.parametrize("variable", ["SPECSYNC_SITES", "SPECSYNC_STATS_DIR", "SPECSYNC_TRIAL"])
def test_the_variables_exist(variable):
    assert variable in VARIABLES
    assert f"`{variable}`" in PAGE


def test_numbers_on_the_page_are_the_codes():
    assert command.DEFAULT_RUNS == 60
    assert "`--runs N` is the most runs of one set (default 60)" in PAGE
    assert command.DEFAULT_CONFIDENCE == 0.99
    assert judge.DEFAULT_LIMIT_S == 600.0
    assert (judge.SLOWER, judge.LATER_S, judge.NEARLY) == (3.0, 10.0, 0.8)
    assert (search.ON_RUNS, search.BAD_RUNS, search.MOST_BAD_ON, search.EXTRA_ON_RUNS) == (3, 3, 2, 10)
    assert (search.NOISE, search.DETOUR_ERROR, search.RATE_CONFIDENCE) == (0.01, 0.1, 0.9)
    assert [round(1 / share(1.0, number)) for number in (1, 2, 3)] == [2, 6, 12]
    assert f"`{DEFAULT_PATH}`" in PAGE
