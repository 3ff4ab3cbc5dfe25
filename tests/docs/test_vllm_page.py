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


@pytest.mark.parametrize("name", ["calls", "bytes", "mismatched_calls", "mismatches"])
def test_counters_have_these_names(name):
    from specsync_core.engines.metrics import NAMES

    assert name in NAMES
    assert f"specsync_{name}_total" in PAGE


def test_limits_are_stated_where_a_user_looks():
    limits = PAGE.split("## Limits")[1].split("## ")[0]
    for said in ("Agreement is not a correct distribution", "#55005", "takes the smallest of all ranks"):
        assert said in limits


def test_the_start_line_is_the_adapters():
    source = (Path(__file__).parents[2] / "specsync_core" / "engines" / "vllm_adapter.py").read_text()
    line = re.search(r"^    specsync: vllm (.*) runner, (.*), (\d) ranks: keeps .* in agreement\.$", PAGE, re.MULTILINE)
    assert line
    assert '"specsync: vllm %s, %s runner, %s, %d ranks: %s."' in source
