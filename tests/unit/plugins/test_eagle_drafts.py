"""EAGLE's draft steps in SGLang: each is synchronised once, on every path through the loop."""

from types import SimpleNamespace

import pytest
import torch
from specsync_eagle import sglang_drafts

from specsync_core import Call
from specsync_core.engines.known import SGLANG
from specsync_core.engines.versions import is_among
from tests.unit.plugins.support import LoneSync

FIRST, SELECTED, CHAINED = (
    next(point for point in sglang_drafts.points() if point.target.endswith(name))
    for name in ("draft_forward", "select_top_k_tokens", "draft_topk1_postprocess")
)


def top_k(rows=4):
    return torch.rand(rows, 2), torch.zeros(rows, 2, dtype=torch.int64)


def selection(step, scope=None, rows=4):
    return Call((step, *top_k(rows), None, None, 2), {}, None, scope)


def batch(rows=4):
    topk_p, topk_index = top_k(rows)
    return Call((None, SimpleNamespace(spec_info=SimpleNamespace(topk_p=topk_p, topk_index=topk_index))), {})


@pytest.mark.parametrize("version", SGLANG.versions)
def test_every_known_version_has_the_steps_and_one_tree(version):
    fitting = [point for point in sglang_drafts.points() if is_among(version, point.versions)]
    assert [point.sites for point in fitting] == [("eagle-draft",)] * 3 + [("eagle-draft-tree",)]


def test_the_loops_first_step_is_synced_where_it_begins_and_not_again():
    assert FIRST.site_of(batch()) == "eagle-draft"
    assert SELECTED.site_of(selection(0, scope="loop")) is None
    assert SELECTED.site_of(selection(1, scope="loop")) == "eagle-draft"


def test_a_loop_of_another_worker_has_its_first_step_synced_too():
    assert SELECTED.site_of(selection(0)) == "eagle-draft"


def test_a_chains_steps_are_synced_where_they_come_from():
    assert CHAINED.site_of(Call((), {}, top_k())) == "eagle-draft"
    assert CHAINED.when == "after"


def test_an_idle_batch_is_left_alone():
    assert FIRST.site_of(batch(rows=0)) is None
    assert SELECTED.site_of(selection(1, rows=0)) is None
    assert CHAINED.site_of(Call((), {}, top_k(rows=0))) is None


@pytest.mark.parametrize(
    ("point", "call"), [(FIRST, batch()), (SELECTED, selection(1)), (CHAINED, Call((), {}, top_k()))]
)
def test_what_is_taken_fits_the_site(point, call):
    LoneSync().sync("eagle-draft", *point.tensors_of(call))
