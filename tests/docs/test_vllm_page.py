"""docs/vllm.md says what the code says."""

import re
from pathlib import Path

import pytest

from specsync_core import load_registry
from specsync_core.engines.known import VLLM

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()


def test_every_site_of_vllm_is_explained():
    slugs = {site.slug for site in load_registry().sites if site.algorithm == "vllm"}
    assert slugs == set(re.findall(r"`(vllm-[a-z-]+)`", PAGE.split("## What is synchronised")[1].split("\n\n`")[0]))


def test_versions_are_the_known_ones():
    shown = re.findall(r"^\| (\d[\d., ]*) \| (run by|parameters)", PAGE, re.MULTILINE)
    tested, checked = (versions.split(", ") for versions, _ in shown)
    assert tuple(tested) == VLLM.tested
    assert sorted(tested + checked) == sorted(VLLM.versions)


def test_counters_have_these_names():
    from specsync_core.diagnostics.metrics import exported_names

    named = set(re.findall(r"`(specsync_[a-z_]+_total)`", PAGE))
    assert len(named) >= 4
    assert named <= exported_names()


def test_limits_are_stated_where_a_user_looks():
    limits = PAGE.split("## Limits")[1].split("## ")[0]
    for said in ("Agreement is not a correct distribution", "#55005", "takes the smallest of all ranks"):
        assert said in limits


def test_the_start_line_is_the_adapters():
    from specsync_core.engines.vllm_adapter import LIMITS

    shown = re.search(
        r"^specsync: vllm \S+, V\d runner, \w+, 2 ranks: keeps .* in agreement\. (.*)$", PAGE, re.MULTILINE
    )
    assert shown
    assert shown[1] == LIMITS


@pytest.mark.parametrize("part", ["serve", "matrix", "oldest", "overhead", "leading"])
def test_what_is_generated_from_runs_is_there(part):
    generated = PAGE.split(f"<!-- {part}: begin -->")[1].split(f"<!-- {part}: end -->")[0]
    assert len(generated.splitlines()) > 3
    assert "wrong text" in generated or part != "matrix"


def test_with_sync_nothing_differed_in_any_run_that_is_shown():
    matrix = PAGE.split("<!-- matrix: begin -->")[1].split("<!-- matrix: end -->")[0]
    cells = [line.split("|")[4].strip() for line in matrix.splitlines() if line.startswith("| V")]
    assert cells
    for cell in cells:
        assert re.match(r"0 of \d+ steps", cell)
        assert "wrong" not in cell
