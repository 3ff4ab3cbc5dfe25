"""The real engine on two CPU ranks, one of them at fault: a hang or wrong text without specsync, right text with it.

Each setup is two runs. Without specsync the engine first serves as it should, which gives the right text, and then
with the fault. With specsync it serves with the fault from the start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.engines.sglang.environment import is_built
from tests.engines.sglang.serving import Served, serve

SKEW = "1.5"
"""Rank 1's target logits, off by so many of their standard deviations: an inexact all-reduce, only larger."""
DRAW = "draw"
"""Rank 1's generator, one draw ahead of rank 0's."""


@dataclass(frozen=True)
class Setup:
    version: str
    arguments: dict[str, object]
    fault: str = SKEW
    temperature: float = 0.0
    tokens: int = 16
    environ: dict[str, str] = field(default_factory=dict)
    spawn: bool = False
    """Start the engine's processes as the engine does; half a minute longer."""


NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_max_bfs_breadth": 1,
    "speculative_ngram_min_bfs_breadth": 1,
}
DSPARK = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": "dspark"}
DFLASH = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "dflash", "dtype": "bfloat16"}
EAGLE = {
    "speculative_algorithm": "EAGLE",
    "speculative_draft_model_path": "eagle",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
    "speculative_draft_attention_backend": "torch_native",
}
SIMULATED = {"SGLANG_SIMULATE_ACC_LEN": "2.5", "SGLANG_SIMULATE_ACC_METHOD": "multinomial"}
SETUPS = {
    "0.5.17 ngram": Setup("0.5.17", NGRAM, spawn=True),
    "0.5.17 dspark, T=0": Setup("0.5.17", DSPARK),
    "0.5.17 dspark, T=1": Setup("0.5.17", DSPARK, temperature=1.0),
    "0.5.17 dflash": Setup("0.5.17", DFLASH),
    "0.5.17 eagle": Setup("0.5.17", EAGLE, tokens=8),  # the interpreter is slow on trees
    "0.5.23 ngram": Setup("0.5.23", NGRAM),
    "0.5.23 eagle": Setup("0.5.23", EAGLE, tokens=8),
    # One draw ahead, rank 1 needs 11 steps for 28 tokens, and rank 0 12: what is accepted is always the same token.
    "0.5.23 dflash, simulated acceptance": Setup("0.5.23", DFLASH, DRAW, tokens=28, environ=SIMULATED),
}
"""Of 0.5.23 the setups whose decisions the engine's own fix leaves to each rank."""
each = pytest.mark.parametrize("name", SETUPS, scope="module")  # both runs of a setup, one after the other
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:record_property is incompatible"),  # `matrix_page.py` reads what is recorded
]


def run(setup: Setup, *rounds: str, plugin: bool) -> Served:
    """Serve rounds, each ``PROMPTS:FAULT``; without the plugin the ranks' collectives are traced.

    With the plugin every site is on, unless the setup says otherwise.
    """
    if not is_built(setup.version):
        pytest.skip(f"no environment of sglang {setup.version}: run `make test-engines`")
    options = [f"--tokens={setup.tokens}", f"--temperature={setup.temperature}"]
    options += ["--spawn"] * (setup.spawn and plugin)
    with TemporaryDirectory() as folder:
        on = {"SPECSYNC_SITES": "all"} if plugin else {"SGLANG_PLUGINS": "specsync-test-shim", "SHIM_TRACE": folder}
        environ = {**on, **setup.environ}
        return serve(setup.version, setup.arguments, [*options, "--rounds", *rounds], environ, Path(folder))


@cache
def without(name: str) -> Served:
    fault = SETUPS[name].fault
    return run(SETUPS[name], "3:0", "1:0", f"1:{fault}", f"3:{fault}", plugin=False)


def right(name: str) -> dict[int, list[list[int]]]:
    """The right text, by the number of prompts: of the rounds without the fault."""
    served = without(name)
    assert len(served.rounds) >= 2, f"it did not serve even without a fault: {served}"
    return {3: served.rounds[0], 1: served.rounds[1]}


def what_happened(name: str) -> list[str]:
    """What the fault did, in order; empty when it did nothing. A run that ended for another reason fails the test."""
    served = without(name)
    found = [wrong for tokens in served.rounds[2:] if (wrong := compare(tokens, right(name)[len(tokens)]))]
    if served.end == "hung":
        return [*found, f"hung: {served.parted}"]
    if served.end == "died":  # gloo ends a process that gets another number of bytes than it waits for
        assert served.parted, served
        assert "gloo" in served.log, served
        return [*found, f"ended by gloo: {served.parted}"]
    assert served.end == "finished", served
    return found


def compare(tokens: list[list[int]], wanted: list[list[int]]) -> str | None:
    pairs = [pair for one, other in zip(tokens, wanted, strict=True) for pair in zip(one, other, strict=True)]
    count = sum(a != b for a, b in pairs)
    return f"wrong text: {count} of {len(pairs)} tokens differ" if count else None


@each
def test_without_specsync_the_engine_hangs_or_answers_wrongly(name, record_property):
    what = what_happened(name)
    record_property("setup", name)
    record_property("without specsync", "; then ".join(what) or "right text")
    assert what


@each
def test_with_specsync_the_engine_gives_the_right_text(name, record_property):
    wanted = right(name)
    fault = SETUPS[name].fault
    healed = run(SETUPS[name], f"3:{fault}", f"1:{fault}", plugin=True)
    assert healed.rounds == (wanted[3], wanted[1]), healed
    assert "hooks proven on 2 ranks" in healed.log, healed
    record_property("setup", name)
    record_property("with specsync", "right text")


@pytest.mark.parametrize(
    ("arguments", "policy"), [(DFLASH, "rng"), (NGRAM, "all,-eagle-ngram-tree")], ids=["dflash", "ngram"]
)
def test_a_decision_that_the_policy_leaves_alone_is_not_waited_for(arguments, policy):
    """DFLASH greedy: of its verdicts `rng` leaves the sampled ones, which never come. NGRAM: without a grammar."""
    setup = Setup("0.5.17", arguments, tokens=24, environ={"SPECSYNC_SITES": policy})
    served = run(setup, "1:0", plugin=True)
    assert served.end == "finished", served
    assert "hooks proven on 2 ranks" in served.log, served
