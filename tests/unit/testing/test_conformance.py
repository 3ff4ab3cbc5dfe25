"""`plugin_conformance`: the built-in plugins keep every rule, and a plugin that breaks one is told which, and where.

The broken ones are the example plugin with one line changed.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from specsync_core.testing import ConformanceError, Scenario, plugin_conformance
from specsync_core.testing.conformance import GREEDY, SAMPLED
from specsync_core.testing.rules import RULES

EXAMPLE = Path(__file__).parents[3] / "examples/third_party_plugin/specsync_medusa"
_numbers = count()

CAPTURED = {
    "dspark": {"dspark-graph-greedy", "dspark-graph-sample", "dspark-accept-graph"},
    "dflash": {"dflash-draft-greedy"},
}
EAGER, FOLDED, DRAWN = Scenario(GREEDY), Scenario(GREEDY, folded=True), Scenario(SAMPLED)


@pytest.fixture
def medusa(tmp_path, monkeypatch) -> Iterator:
    """Make the example plugin with lines changed, under a package name of its own."""
    made: list[str] = []

    def make(**changes: tuple[str, str]) -> ModuleType:
        name = f"specsync_medusa_{next(_numbers)}"
        shutil.copytree(EXAMPLE, tmp_path / name)
        for path in (tmp_path / name).iterdir():
            if path.suffix not in (".py", ".toml"):
                continue
            text = path.read_text().replace("specsync_medusa", name)
            if path.stem in changes:
                old, new = changes[path.stem]
                assert old in text, f"the example has changed: {old!r}"
                text = text.replace(old, new, 1)
            path.write_text(text)
        made.append(name)
        return importlib.import_module(name)

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for module in [module for module in sys.modules if module.split(".")[0] in made]:
        del sys.modules[module]


def broken_rules(plugin: ModuleType, scenario: Scenario) -> list[tuple[str, str]]:
    """The rules and sites that the message names, but for sites that one scenario cannot see."""
    try:
        plugin_conformance(plugin, scenarios=[scenario])
    except ConformanceError as error:
        named = re.findall(r"^  rule '([a-z]+)', site ([^:]+): ", str(error), re.MULTILINE)
        return [(rule, site) for rule, site in named if rule != "covered"]
    return []


@pytest.mark.parametrize("name", ["dspark", "dflash", "eagle", "eagle-rocm", "vllm"])
def test_built_in_plugins_keep_every_rule(name):
    report = plugin_conformance(name)
    assert report.violations == []
    for slug in report.declared:
        assert report.calls.get(slug) or report.points.get(slug)
        assert not report.calls.get(slug) or report.changed[slug]
    assert report.captured == CAPTURED.get(name, set())


@pytest.mark.parametrize("scenario", [EAGER, FOLDED, DRAWN], ids=str)
def test_the_example_breaks_none(medusa, scenario):
    assert broken_rules(medusa(), scenario) == []


def test_with_three_ranks_too(medusa):
    plugin_conformance("dflash", world_size=3, scenarios=[EAGER])


BROKEN = {
    "a site that is not declared": (
        {"heads": ('sync.sync("medusa-heads"', 'sync.sync("medusa-headz"')}, EAGER, "declared", "medusa-heads",
    ),
    "a site of another kind": (
        {"heads": ('sync.sync("medusa-heads"', 'sync.sync("medusa-mem"')}, EAGER, "declared", "medusa-mem",
    ),
    "another dtype": ({"heads": (".indices", ".values")}, EAGER, "payload", "medusa-heads"),
    "another number of dimensions": (
        {"heads": (".topk(topk, dim=-1).indices", ".argmax(dim=-1)")}, EAGER, "payload", "medusa-heads",
    ),
    "other rows than the batch has": (
        {"speculator": ('sync("medusa-target", tokens_B)', 'sync("medusa-target", tokens_B[:2]); agreed_B = tokens_B')},
        EAGER, "payload", "medusa-target",
    ),
    "synced twice": (
        {"speculator": ('agreed_B: Tensor', 'context.sync.sync("medusa-target", tokens_B)\n        agreed_B')},
        DRAWN, "once", "medusa-target",
    ),
    "a copy synced twice": (
        {"heads": ("return agreed_BGK", 'return sync.sync("medusa-heads", agreed_BGK.clone())')},
        EAGER, "once", "medusa-heads",
    ),
    "synced once more behind another decision": (
        {"speculator": (
            "        agreed = self._accept(draft, target_logits_BWV)\n",
            "        agreed = self._accept(draft, target_logits_BWV)\n"
            '        self._context.sync.sync("medusa-target", agreed.bonus + 0)\n'
            '        self._context.sync.sync("medusa-accept-greedy", *(each.clone() for each in agreed))\n',
        )},
        EAGER, "once", "medusa-accept-greedy",
    ),
    "synced only where something was accepted": (
        {"speculator": (
            'return acceptance.TreeAccept(*context.sync.sync("medusa-accept-greedy", *own))',
            'return context.sync.sync("medusa-accept-greedy", *own) and own if int(own.bonus[0]) % 2 else own',
        )},
        EAGER, "order", "medusa-accept-greedy",
    ),
    "derived before the sync": (
        {"speculator": (
            'return acceptance.TreeAccept(*context.sync.sync("medusa-accept-greedy", *own))',
            'bonus_B = own.bonus + 0; return acceptance.TreeAccept('
            'context.sync.sync("medusa-accept-greedy", *own)[0], bonus_B)',
        )},
        EAGER, "derived", "medusa-accept-greedy",
    ),
    "a copy is synced, one's own values are used": (
        {"heads": (
            'agreed_BGK: Tensor = sync.sync("medusa-heads", logits_BGV.topk(topk, dim=-1).indices)',
            'agreed_BGK = logits_BGV.topk(topk, dim=-1).indices; sync.sync("medusa-heads", agreed_BGK.clone())',
        )},
        EAGER, "derived", "medusa-heads",
    ),
    "a decision without a site": (
        {"speculator": ('agreed_B: Tensor = context.sync.sync("medusa-target", tokens_B)', "agreed_B = tokens_B")},
        DRAWN, "derived", "-",
    ),
    "the group's minimum is not used": (
        {"speculator": ("can_capture(free_gib)", "can_capture(64.0)")}, FOLDED, "obeyed", "medusa-mem",
    ),
    "a host read in a graph": (
        {"heads": ("        self.candidates_BGK[:batch].copy_", "        if bool(self.logits_BGV[0, 0, 0] > 1e9):\n"
                   "            return\n        self.candidates_BGK[:batch].copy_")},
        FOLDED, "capture", "medusa-heads",
    ),
    "a list made in a graph": (
        {"heads": ("        self.candidates_BGK[:batch].copy_", "        self.candidates_BGK.tolist()\n"
                   "        self.candidates_BGK[:batch].copy_")},
        FOLDED, "capture", "medusa-heads",
    ),
    "a mask in a graph": (
        {"heads": ("        self.candidates_BGK[:batch].copy_",
                   "        self.logits_BGV[self.logits_BGV > 99]\n        self.candidates_BGK[:batch].copy_")},
        FOLDED, "capture", "medusa-heads",
    ),
    "a tensor that the graph did not see": (
        {"heads": ("self.logits_BGV[:batch].copy_(logits_BGV)", "self.logits_BGV = logits_BGV + 0")},
        FOLDED, "capture", "medusa-heads",
    ),
    "a generator that the graph does not know": (
        {"heads": ("        self.candidates_BGK[:batch].copy_",
                   "        torch.rand(1, generator=torch.Generator())\n        self.candidates_BGK[:batch].copy_")},
        FOLDED, "capture", "medusa-heads",
    ),
    "a site that may not be captured": (
        {"sites": ("graph = true", "graph = false")}, FOLDED, "capture", "medusa-heads",
    ),
    "a step that commits nothing": (
        {"acceptance": ("commit_lens_B=len_B1.squeeze(1) + 1", "commit_lens_B=len_B1.squeeze(1)")},
        EAGER, "contract", "medusa-accept-greedy",
    ),
    "a point at no site": (
        {"vllm": ('sites=("medusa-block",)', 'sites=("medusa-blok",)')}, EAGER, "points", "medusa-blok",
    ),
    "a point at a site of another kind": (
        {"vllm": ('sites=("medusa-block",)', 'sites=("medusa-mem",)')}, EAGER, "points", "medusa-mem",
    ),
    "a point in no known version": ({"vllm": ('"==0.32.0"', '"==0.1.0"')}, EAGER, "points", "medusa-block"),
    "versions that cannot be read": ({"vllm": ('"==0.32.0"', '">>9"')}, EAGER, "points", "medusa-block"),
    "an algorithm of another name": (
        {"__init__": ('name="medusa"', 'name="medusas"')}, EAGER, "declared", "-",
    ),
    "an unknown draft network": (
        {"__init__": ('draft_kind="block"', 'draft_kind="blocks"')}, EAGER, "declared", "-",
    ),
    "a policy with a typo": ({"vllm": ("-vllm-draft-block", "-vllm-draft-blok")}, EAGER, "policy", "-"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_told_the_rule_and_the_site(medusa, case):
    changes, scenario, rule, site = BROKEN[case]
    assert rule in RULES
    assert (rule, site) in broken_rules(medusa(**changes), scenario)


def test_an_algorithm_that_raises_is_named_with_the_site_before(medusa):
    plugin = medusa(
        speculator=(
            "    def accept(self",
            "    def accept(self, *_):\n        raise ValueError('boom')\n\n    def old(self",
        )
    )
    with pytest.raises(
        ConformanceError, match=r"rule 'runs', site medusa-heads: group rank 0 fails .*ValueError: boom"
    ):
        plugin_conformance(plugin, scenarios=[EAGER])


def test_behind_a_failure_no_healthy_site_is_accused(medusa):
    """What the failure kept from being reached is neither uncovered nor disobeyed."""
    for change in (
        ("    def accept(self", "    def accept(self, *_):\n        raise ValueError\n\n    def old(self"),
        ('sync("medusa-accept-greedy", *own)', 'sync("medusa-accept-greedy", *own[:1])'),
    ):
        with pytest.raises(ConformanceError) as caught:
            plugin_conformance(medusa(speculator=change), scenarios=[EAGER])
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == 1, str(caught.value)


def test_a_site_that_nothing_calls_is_named(medusa):
    plugin = medusa(sites=("[site.medusa-heads]", _MORE))
    with pytest.raises(ConformanceError, match="rule 'covered', site medusa-more: it is declared, and nothing"):
        plugin_conformance(plugin)


_MORE = """[site.medusa-more]
number = 1199
algorithm = "medusa"
phase = "draft"
kind = "broadcast"
cause = "float"
tensors = [{ name = "more", shape = ["B"], dtypes = ["int64"] }]
graph = false
platforms = ["cuda"]
summary = "nothing calls it"

[site.medusa-heads]"""


def test_a_name_that_is_not_installed_is_told_what_is():
    with pytest.raises(
        ConformanceError, match=r"no plugin 'dsprak' is installed \(did you mean 'dspark'\?\)\. Installed:"
    ):
        plugin_conformance("dsprak")
