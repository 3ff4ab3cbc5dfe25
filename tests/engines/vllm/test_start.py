"""An engine that starts as a user's does, and what a plugin changes of that: nothing of what is imported, and when."""

from __future__ import annotations

import pytest

from tests.engines.vllm.environment import NEWEST, is_built
from tests.engines.vllm.matrix import SETUPS
from tests.engines.vllm.serving import serve

SHIM = "specsync-test-shim"
"""It arms faults and lists modules; vLLM's own plugins, which import more, stay away in both runs."""
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not is_built(NEWEST), reason=f"no environment of vllm {NEWEST}: run `make test-engines`"),
]


def test_workers_import_the_same_modules_in_the_same_order_with_and_without_the_plugin():
    without = serve(SETUPS["V1, eagle"], "all", [""], fork=False, VLLM_PLUGINS=SHIM)
    assert without.ended, without.log[-4000:]
    assert "specsync:" not in without.log
    with_it = serve(SETUPS["V1, eagle"], "all", [""], fork=False, VLLM_PLUGINS=f"specsync,{SHIM}")
    assert with_it.ended, with_it.log[-4000:]
    assert "specsync: hooks proven on 2 ranks" in with_it.log
    assert with_it.round("").tokens == without.round("").tokens
    for ours, theirs in zip(with_it.stats, without.stats, strict=True):
        assert ours["modules"] == theirs["modules"]
