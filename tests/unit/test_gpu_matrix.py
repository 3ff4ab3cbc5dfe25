"""What the GPU matrix says of engines in which rank 1 goes astray, and of those that do not come to their end."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.matrix_page import fault_table

HERE = Path(__file__).parents[2] / "benchmarks" / "sglang_gpu"


@pytest.fixture
def matrix(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module("matrix")
    for name in ("matrix", "fleet", "serve"):
        sys.modules.pop(name, None)


class Process:
    def __init__(self, ended: bool) -> None:
        self.ended = ended

    def poll(self) -> int | None:
        return 1 if self.ended else None


class FakeEngine:
    """Answers with texts in turn: the warm-up's first; None is no answer, and nothing at all never started."""

    def __init__(self, name: str, texts: list[str | None], ended: bool = False) -> None:
        self.name, self.texts, self.process = name, list(texts), Process(ended)
        self.started = {"ready": 1} if texts else None

    def ask(self, limit_s: float, **wanted: Any) -> dict[str, Any] | None:
        text = self.texts.pop(0) if self.texts else "more"
        return None if text is None else {"digest": text, "tokens_per_s": 1.0, "steps": 1}

    def signal(self, number: int) -> None:
        pass

    def counters(self) -> list[dict[str, Any]]:
        sites = {"eagle-draft": {"mismatches": 7}, "eagle-target": {"mismatches": 0}}
        return [{"rank": 0, "sites": {}}, {"rank": 1, "sites": sites}] if self.started else []

    def log_end(self) -> str:
        return "the log"


RIGHT = ["warm", "a", "b", "c", "d"]
SITES = "`eagle-draft` 7"


@pytest.mark.parametrize(
    ("clean", "healed", "stock", "ended", "row"),
    [
        (RIGHT, RIGHT, ["warm", "a", None], False, ["hung", "the clean run's tokens", SITES]),
        (RIGHT, RIGHT, ["warm", "a", None], True, ["ended by itself", "the clean run's tokens", SITES]),
        (RIGHT, RIGHT, ["warm", "a", "b", "x", "d"], False, ["wrong text", "the clean run's tokens", SITES]),
        (RIGHT, RIGHT, RIGHT, False, ["right text", "the clean run's tokens", SITES]),
        (RIGHT, RIGHT, [], False, ["did not start", "the clean run's tokens", SITES]),
        (RIGHT, ["warm", "a", "b", "x", "d"], RIGHT, False, ["right text", "**wrong text**", SITES]),
        (RIGHT, [None, "a"], [None, "a"], False, ["hung", "**hung**", SITES]),
        ([None], RIGHT, RIGHT, False, ["no clean run", "**no clean run**", SITES]),
        ([], [], [], False, ["did not start", "**did not start**", "not kept"]),
    ],
)
def test_what_became_of_a_rank_that_went_astray(matrix, clean, healed, stock, ended, row):
    texts = {"clean": clean, "healed": healed, "stock": stock}
    engines = [FakeEngine(f"fault-eagle-{name}", each, ended) for name, each in texts.items()]
    found = matrix.Matrix(matrix.Fleet(engines), argparse.Namespace(tokens=128), float("inf")).fault("eagle")
    said = list(fault_table({"eagle": found}))[-1]
    assert [cell.strip() for cell in said.strip("| ").split(" | ")][2:] == row


def test_an_engine_that_does_not_come_through_its_warm_up_takes_no_turns(matrix):
    """Its late answer would be taken for the next round's."""
    engines = {"stock": FakeEngine("stock", []), "specsync": FakeEngine("specsync", [None, "late"])}
    of = matrix.Matrix(matrix.Fleet(list(engines.values())), argparse.Namespace(), float("inf"))
    of._stretches = lambda engine: []
    run = of._take_turns(engines, {"batch": 1, "temperature": 0.0}, rounds=2)
    assert run["digests"] == {"stock": ["more", "more"]}
    assert (run["ratios"], run["step_ratios"]) == ({}, {})
