"""The recorder and the doctor inside the real engine: a fault that is only watched is named, with its site and rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsync_core.diagnostics.runs import examine_runs
from tests.engines.sglang.serving import serve
from tests.engines.sglang.test_engine import NGRAM, SKEW, is_built

pytestmark = pytest.mark.timeout(900)


def test_a_fault_that_is_only_watched_is_named_with_its_rank(tmp_path: Path) -> None:
    """NGRAM with rank 1's logits skewed, as in `test_engine`; here no site is synchronised, and all are compared."""
    if not is_built("0.5.17"):
        pytest.skip("no environment of sglang 0.5.17: run `make test-engines`")
    folder, dumps = tmp_path / "run", tmp_path / "dumps"
    folder.mkdir()
    environ = {
        "SPECSYNC_SITES": "all:audit",
        "SPECSYNC_DUMP_DIR": str(dumps),
        "SPECSYNC_WATCHDOG_S": "4",
        "SPECSYNC_CHECK_EVERY": "2",
        "SHIM_TRACE": str(folder),
    }
    options = ["--tokens=16", "--temperature=0.0", "--rounds", "3:0", f"1:{SKEW}", f"3:{SKEW}"]
    served = serve("0.5.17", NGRAM, options, environ, folder)
    [run], _ = examine_runs(dumps)
    found = run.diagnosis
    assert found.finding in ("drift-hang", "drift-crash", "silent-divergence"), f"{served}\n{found.text}"
    assert found.site is not None
    assert found.site.startswith("eagle-"), found.text
    assert (found.group_rank, found.missing_ranks) == (1, ())
    assert found.headline.startswith(f"Rank 1 decided differently at {found.site} in step "), found.text
    checked = {each.site: each for each in run.evidence.counted.sites if each.group_rank == 1}
    if checked:  # there are dumps
        assert checked["state-request-ids"].checks > 3, found.text
        assert checked["state-seq-lens"].checks > 3, found.text
    if served.end == "hung":
        assert all(dump.is_stall and dump.stats for dump in run.evidence.dumps.values()), found.text
        assert sorted(run.evidence.dumps) == [0, 1], found.text
