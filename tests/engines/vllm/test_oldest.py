"""The oldest vLLM that specsync knows, for real: the newest has the whole matrix."""

from __future__ import annotations

import pytest

from tests.engines.vllm.environment import OLDEST, is_built
from tests.engines.vllm.matrix import HOT, SETUPS, keep_oldest
from tests.engines.vllm.serving import serve

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not is_built(OLDEST), reason=f"no environment of vllm {OLDEST}: run `make test-engines`"),
]


@pytest.mark.parametrize("name", ["V1, ngram", "V1, eagle"])
def test_faults_diverge_without_sync_and_change_nothing_with_it(name):
    faults = ["tok@4", "acc-1@4"]
    audit = serve(SETUPS[name], "all:audit", ["", *faults, HOT], version=OLDEST)
    assert audit.ended, audit.log[-4000:]
    assert audit.round("").differing == 0
    assert any(audit.round(fault).differing for fault in faults)

    run = serve(SETUPS[name], "all", ["", *faults, HOT], version=OLDEST)
    assert run.ended, run.log[-4000:]
    clean = run.round("").tokens
    assert [(run.round(fault).tokens, run.round(fault).differing) for fault in faults] == [(clean, 0)] * len(faults)
    assert run.round(HOT).differing == 0
    assert f"specsync: vllm {OLDEST}, V1 runner" in run.log
    assert "specsync: hooks proven on 2 ranks" in run.log
    keep_oldest(name, {"all:audit": audit, "all": run})
