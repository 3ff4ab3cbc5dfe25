"""docs/metrics-and-control.md says what the code says, and its worked example is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specsync_core.control import listener, pledges, protocol
from specsync_core.diagnostics.metrics import exported_names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics-and-control.md").read_text()
WORKED = PAGE.split("### A worked example")[1].split("### What cannot change")[0]
BIN = Path(sys.executable).parent


def sessions() -> list[tuple[str, str]]:
    """The commands of the worked example in order, each with the output that stands below it."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", WORKED, re.MULTILINE | re.DOTALL):
        for part in block.removeprefix("$ ").split("\n$ "):
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def shape(text: str) -> list[str]:
    """Lines without numbers, digests and alignment."""
    lines = (re.sub(r"\b[0-9a-f]{12}\b|\d[\d.,]*", "#", line) for line in text.splitlines())
    return [" ".join(line.split()) for line in lines if line.strip()]


def metrics_page(environ: dict[str, str]) -> str:
    """What the page's one-liner prints."""
    (typed,) = re.findall(r"^python -c .*multiprocess.*$", PAGE, re.MULTILINE)
    return subprocess.run(
        ["sh", "-c", typed], env=environ, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def converse(folder: Path, steps: int) -> tuple[list[str], str, dict[str, str], bool]:
    """Type the worked example's commands while its engine takes so many steps.

    Returns:
        What each command printed, what the example said in the end, the environment, and whether the engine lived on
        through the last command; how long it lives depends on the machine.
    """
    (start, _), (export, _), *commands = sessions()
    assert start == "python examples/live_control.py /tmp/specsync.sock 350 &"
    assert export == "export SPECSYNC_CONTROL=/tmp/specsync.sock"
    path = folder / "s.sock"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SPECSYNC_")}
    environ |= {"SPECSYNC_CONTROL": str(path), "PATH": f"{BIN}:{environ['PATH']}", "COLUMNS": "200"}
    (counts := folder / "counts").mkdir()
    environ["PROMETHEUS_MULTIPROC_DIR"] = str(counts)
    command = [sys.executable, "examples/live_control.py", str(path), str(steps)]

    def answer(typed: str) -> str:
        done = subprocess.run(["sh", "-c", typed], env=environ, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environ) as example:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline and example.poll() is None:
            time.sleep(0.05)
        time.sleep(1)  # some steps
        answers = [answer(typed) for typed, _ in commands]
        lived = answer("specsync ctl status && echo lives").endswith("lives\n")
        said, _ = example.communicate(timeout=300)
    return answers, said, environ, lived


@pytest.mark.timeout(600)
def test_the_worked_example_prints_what_the_page_shows(tmp_path):
    for steps in (150, 600, 2400):
        (folder := tmp_path / f"{steps}").mkdir()
        answers, said, environ, lived = converse(folder, steps)
        if lived:
            break
    assert lived, "the engine does not live through the commands"
    for (typed, shown), answered in zip(sessions()[2:], answers, strict=True):
        assert shape(answered) == shape(shown.replace("/tmp/specsync.sock", environ["SPECSYNC_CONTROL"])), typed
    (shown,) = re.findall(r"^```text\n(.*?)^```$", WORKED, re.MULTILINE | re.DOTALL)
    assert shape(said) == shape(shown)
    same, total = map(int, re.findall(r"\d+", said)[:2])
    assert 0 < same < total, "audit lets wrong tokens through, sync does not"
    found = metrics_page(environ)
    assert re.search(
        r'specsync_mismatches_total\{group="tp-0",group_rank="1",site="dspark-accept-greedy"\} [1-9]', found
    )
    assert re.search(r'specsync_checks_total\{group="tp-0",group_rank="0"\} 1\.0', found), "dspark-mem alone"


def test_every_metric_is_listed():
    assert set(re.findall(r"^\| `(specsync_\w+)` \|", PAGE, re.MULTILINE)) == exported_names()


def test_every_command_is_listed():
    assert set(re.findall(r"^\| `specsync ctl (\w+)", PAGE, re.MULTILINE)) == set(protocol.ARGUMENTS)


def test_bounds_are_those_of_the_code():
    security = PAGE.split("### Security")[1]
    assert f"at most\n{protocol.MAX_REQUEST_BYTES} bytes" in security
    assert f"answers of at most {protocol.MAX_ANSWER_BYTES >> 20} MiB" in security
    assert f"has {listener.READ_S:g} seconds for its line" in security
    assert listener.MAX_CLIENTS == 8
    assert f"does not answer within {pledges.ARM_S:g} seconds" in PAGE
