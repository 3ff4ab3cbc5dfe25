"""Live control of a real engine: started with its sites off, widened and narrowed while it serves."""

from __future__ import annotations

import threading
import time

import pytest

from specsync_core.control.client import ask
from specsync_core.control.protocol import Request
from tests.engines.vllm.environment import NEWEST, is_built
from tests.engines.vllm.test_serve import complete, vllm_serve

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_built(NEWEST), reason=f"no environment of vllm {NEWEST}: run `make test-engines`"),
]


def calls(answer: dict) -> list[int]:
    """How often each rank has called the site of accepted tokens."""
    return [report.get("vllm-tokens", {"calls": 0})["calls"] for _, report in sorted(answer["group_ranks"].items())]


def test_sites_change_on_both_workers_while_they_serve(tmp_path, monkeypatch):
    path = str(tmp_path / "ctl.sock")
    monkeypatch.setenv("SPECSYNC_CONTROL", path)
    monkeypatch.setenv("SPECSYNC_SITES", "off")
    with vllm_serve(tmp_path) as (address, _):
        complete(address)
        is_over = threading.Event()

        def clients() -> None:
            while not is_over.is_set():
                complete(address)

        serving = threading.Thread(target=clients)
        serving.start()
        try:
            off = calls(ask(path, Request("stats")))
            widened = ask(path, Request("sites", "all", wait_s=60))
            time.sleep(2)
            on = calls(ask(path, Request("stats", wait_s=60)))
            narrowed = ask(path, Request("mode", "vllm-tokens", "off", wait_s=60))
            after = calls(ask(path, Request("stats", wait_s=60)))
            time.sleep(1)
            later = calls(ask(path, Request("stats", wait_s=60)))
            again = ask(path, Request("mode", "vllm-tokens", "audit", wait_s=60))
            status = ask(path, Request("status"))
        finally:
            is_over.set()
            serving.join()
        assert complete(address) == 32
    assert off == [0, 0]
    assert on[0] > 0
    assert on[1] > 0
    assert after == later, "a site that was turned off is called no more"
    assert widened["applied"] < narrowed["applied"] < again["applied"]
    assert [made["group_ranks"] for made in (widened, narrowed, again)] == [2, 2, 2]
    assert "vllm-drafter-gate" in widened["kept"]
    assert status["sites"]["vllm-tokens"] == "audit"
    assert status["digest"] == again["digest"]
