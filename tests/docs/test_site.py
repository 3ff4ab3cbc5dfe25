"""The documentation site: what its pages say is run, generated, or compared with the code. `make docs` builds it."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tomli

from specsync_core import BroadcastPoint, load_registry, parse_sites, resolve_plan
from specsync_core.cli.app import COMMANDS
from specsync_core.explain import FACTS
from specsync_core.hookspecs import Specs
from specsync_core.settings import VARIABLES
from specsync_core.testing.rules import RULES
from tests.docs.test_readme import run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OWN = sorted(DOCS.glob("*.md"))
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402 - the site's own module

ELSEWHERE = {"sglang", "sglang-matrix", "vllm", "diagnostics", "metrics-and-control", "bisect"}
"""Pages that stand for themselves; the site adds how they begin."""


def text_of(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def sessions(name: str) -> list[tuple[str, str]]:
    """Every ``$ specsync`` command of a page with the output below it."""
    blocks = re.findall(r"^```console\n\$ (.*?)^```$", text_of(name), re.MULTILINE | re.DOTALL)
    return [tuple(block.split("\n", 1)) for block in blocks if "specsync " in block.split("\n", 1)[0]]  # type: ignore[misc]


@pytest.mark.parametrize("page", [page for page in OWN if page.stem not in ELSEWHERE], ids=lambda page: page.stem)
def test_a_page_begins_with_what_its_reader_can_do_after_it(page):
    heading, empty, first = page.read_text().split("\n", 2)
    assert heading.startswith("# ")
    assert empty == ""
    assert first.startswith(generate.OPENING)


def test_the_site_says_it_for_every_other_page():
    settings = (DOCS / "conf.py").read_text()
    assert set(re.findall(r'^    "([a-z-]+)": "', settings, re.MULTILINE)) == ELSEWHERE


@pytest.mark.parametrize(
    ("command", "output"), [each for page in OWN if page.stem not in ELSEWHERE for each in sessions(page.stem)]
)
def test_commands_print_what_the_page_says(command, output):
    assert run(command).strip() == output.strip()


def test_policies_of_the_pages_are_valid(tmp_path):
    registry = load_registry()
    found = set()
    for page in OWN:
        found |= set(re.findall(r"SPECSYNC_SITES=([\w:,-]+)", page.read_text()))
        found |= set(re.findall(r"`(all,[\w:,-]+)`", page.read_text()))
    assert len(found) >= 8
    for policy in found:
        assert parse_sites(policy, registry), policy
    (table,) = re.findall(r"^```toml\n(sites = .*?)^```$", text_of("policies"), re.MULTILINE | re.DOTALL)
    (tmp_path / "specsync.toml").write_text(table)
    assert resolve_plan(registry, environ={}, config=tmp_path / "specsync.toml").timeout_s == 60.0


def test_the_hooks_are_those_of_the_specifications():
    headings = re.findall(r"^## (specsync_\w+)\((\w*)\)$", text_of("hooks"), re.MULTILINE)
    specified = {
        name: [word for word in inspect.signature(hook).parameters if word != "self"]
        for name, hook in vars(Specs).items()
        if name.startswith("specsync_")
    }
    assert {name: [argument] if argument else [] for name, argument in headings} == specified


def test_the_fields_of_a_broadcast_point_are_all_there():
    told = re.findall(r"^\| `(\w+)` \| ", text_of("hooks"), re.MULTILINE)
    assert told == [field.name for field in fields(BroadcastPoint)]


def test_every_rule_of_the_conformance_check_is_explained():
    told = re.findall(r"^\| `([a-z]+)` \| ", text_of("write-a-plugin"), re.MULTILINE)
    assert told == list(RULES)


def test_the_example_on_the_page_is_the_example():
    for path in re.findall(r"literalinclude} \.\./(\S+)", text_of("write-a-plugin")):
        assert (ROOT / path).is_file()
    entry = (ROOT / "examples/third_party_plugin/pyproject.toml").read_text().splitlines()
    first, last = map(
        int, re.findall(r":language: toml\n:lines: (\d+)-(\d+)\n```\n\n\[Hooks", text_of("write-a-plugin"))[0]
    )
    assert entry[first:last] == ["[project.entry-points.specsync]", 'medusa = "specsync_medusa"']


def test_messages_on_the_page_are_in_the_code():
    sources = "\n".join(path.read_text() for path in (ROOT / "specsync_core").rglob("*.py"))
    told = re.findall(r"^\| `([^`]+)` \| ", text_of("failures"), re.MULTILINE)
    assert len(told) > 25
    assert [message for message in told if message not in sources] == []


def test_the_facts_are_all_explained():
    assert re.findall(r"^\| `([a-z-]+)` \| ", text_of("minimal-set"), re.MULTILINE) == list(FACTS)


def test_the_comparison_says_what_the_matrix_says():
    """Who synchronises DSpark's and EAGLE's sites, in releases before and after the published fix."""
    rows = {
        row[0]: row[2:]
        for line in text_of("sglang-matrix").splitlines()
        if (row := [cell.strip(" `") for cell in line.strip("| ").split("|")]) and len(row) == 10
    }
    versions = rows["site"]
    before, after = versions.index("0.5.18"), versions.index("0.5.19")
    assert {rows[slug][before] for slug in rows if slug.startswith("dspark-draft")} == {"specsync"}
    assert {rows[slug][after] for slug in rows if slug.startswith("dspark-draft")} == {"engine"}
    assert rows["dspark-plan"][before] == "both"
    assert {"specsync"} == set(rows["eagle-verify-greedy"])
    assert {"engine"} == set(rows["eagle-verify-sample"])
    assert rows["dspark-mem"][before] == "specsync"
    assert rows["dspark-mem"][after] != "-"


def test_costs_on_the_pages_were_measured():
    document = json.loads((ROOT / "benchmarks/results/two-h200-2026-11-30.json").read_text())
    us = {row["key"]: [row["us"].get(size) for size in ("1", "16", "64")] for row in document["rows"]}

    def span(key: str, digits: int) -> str:
        return f"{min(us[key]):.{digits}f} to {max(us[key]):.{digits}f}"

    def each(key: str) -> str:
        return "{:.0f}, {:.0f} and {:.0f}".format(*us[key])

    comparison, transports = text_of("comparison"), text_of("transports")
    for words in (f"about {us['pg 1'][1]:.0f} microseconds", span("pg 3", 0), span("one-shot counting 3", 1)):
        assert words in comparison
    assert f"`grouped` in {span('grouped 3', 0)}" in comparison
    for words in (span("pg 3", 0), span("one-shot counting 3", 1), each("cost one-shot"), each("cost pg")):
        assert words in transports
    assert f"{each('cost floor')} in" in " ".join(transports.split())


# --- generated pages ---


def test_the_sites_page_has_every_site():
    page = "\n".join(generate.sites_page(load_registry()))
    registry = load_registry()
    for site in registry.sites:
        assert f"### {site.number} {site.slug}\n" in page
        assert site.summary[1:] in page
    for name in registry.presets:
        assert f"| `{name}` | " in page


def test_the_command_page_has_every_command_and_option():
    page = "\n".join(generate.cli_page())
    for name in COMMANDS:
        assert f"## specsync {name}\n" in page
        section = page.split(f"## specsync {name}\n")[1].split("\n## ")[0]
        for parameter in generate.command_of(name).params:
            if parameter.name != "help":
                assert generate._names(parameter) in section
    for variable in VARIABLES:
        assert f"`{variable}`" in page


def test_generated_pages_are_not_kept(tmp_path):
    generate.write_all(tmp_path / "generated")
    assert {path.name for path in (tmp_path / "generated").iterdir()} == {"sites.md", "cli.md", "costs.md"}
    assert all(
        path.read_text().splitlines()[2].startswith(generate.OPENING) for path in (tmp_path / "generated").iterdir()
    )
    assert "/docs/generated/" in (ROOT / ".gitignore").read_text()


def test_the_build_is_part_of_ci():
    assert " docs" in (ROOT / ".ci/run").read_text()
    assert "sphinx -W" in (ROOT / "Makefile").read_text()
    extras = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {re.split(r"[>=]", each)[0] for each in extras["docs"]} == {"sphinx", "furo", "myst-parser"}
