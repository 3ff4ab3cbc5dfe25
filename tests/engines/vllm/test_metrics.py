"""Counters of two workers in the page that the engine serves; with the engine's own prometheus_client."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.engines.vllm.environment import ROOT, is_built, python_of
from tests.engines.vllm.serving import VERSION

pytestmark = pytest.mark.skipif(not is_built(VERSION), reason=f"no environment of vllm {VERSION}")

WORKER = """
import sys
from types import SimpleNamespace
from specsync_core.engines.metrics import Metrics

counts = SimpleNamespace(calls=3, mismatched_calls=int(sys.argv[1]), mismatches=2, bytes=24)
metrics = Metrics(SimpleNamespace(stats=lambda: {"vllm-tokens": counts}), int(sys.argv[1]))
metrics.update()
counts.calls = 5
metrics.update()  # too early: nothing is read
metrics.update(now=True)
"""
PAGE = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_the_engines_page_shows_every_workers_counts(tmp_path):
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def run(program, *arguments):
        command = [str(python_of(VERSION)), "-c", program, *arguments]
        return subprocess.run(command, env=environ, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    run(WORKER, "0")
    run(WORKER, "1")
    lines = run(PAGE).splitlines()
    assert 'specsync_calls_total{group_rank="0",site="vllm-tokens"} 5.0' in lines
    assert 'specsync_calls_total{group_rank="1",site="vllm-tokens"} 5.0' in lines
    assert 'specsync_mismatched_calls_total{group_rank="1",site="vllm-tokens"} 1.0' in lines
