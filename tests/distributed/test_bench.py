"""``specsync bench`` on CPU ranks."""

import json
import subprocess
import sys

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specsync_core.cli", "bench", *arguments], capture_output=True, text=True, check=False
    )


def test_bench_measures_gloo_on_two_ranks(tmp_path):
    run = bench("--device", "cpu", "--quick", "--json", "--out", str(tmp_path / "out.json"))
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert json.loads((tmp_path / "out.json").read_text()) == result
    rows = {row["key"]: row for row in result["rows"]}
    assert set(rows) == {f"gloo {way}{count}" for way in ("", "group ", "grouped ") for count in (1, 3)}
    assert all(row["us"]["16"] > 0 and row["time"] == "host" for row in rows.values())
    assert rows["gloo 3"]["ratio"] == {"16": 1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "--device takes cuda or cpu, not 'tpu'."),
        (("--device", "cpu", "--ranks", "1"), "--ranks takes 2 or more, not 1"),
        (("--device", "cuda", "--ranks", "99"), "--ranks 99 needs as many GPUs"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(arguments, message):
    run = bench(*arguments)
    assert run.returncode == 2
    assert message in run.stderr
