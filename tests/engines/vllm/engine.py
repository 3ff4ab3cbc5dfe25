"""Run vLLM on two CPU ranks and print what it generates; run by the engine's own Python.

    python engine.py MODELS SPECULATION_JSON --rounds '["", "tok@4", "T=0.7"]' --tokens 32

A round serves three requests: with a fault on rank 1 in the verify steps behind the ``@``, or at a temperature. Lines
on stdout: ``ROUND`` with their tokens, the seconds, the number of steps, and how many of these fed the two ranks'
models differently; ``STATS`` with what each worker counted; ``ACCEPTED`` with the engine's own counts of drafted and
accepted tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import zip_longest
from pathlib import Path

PROMPTS = ([5, 6, 7, 8] * 6, [100, 101, 102] * 8, list(range(20, 44)))
"""The first two repeat, so that n-grams match."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("speculation", type=json.loads)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=json.loads, default=["", ""])
    parser.add_argument("--max-len", type=int, default=512)
    given = parser.parse_args()

    from vllm import LLM, SamplingParams

    speculation = dict(given.speculation)
    if "model" in speculation:
        speculation |= {"model": str(given.models / speculation["model"]), "draft_tensor_parallel_size": 2}
    llm = LLM(
        model=str(given.models / "target"),
        tensor_parallel_size=2,
        max_model_len=given.max_len,
        max_num_seqs=8,
        dtype="bfloat16",
        enforce_eager=True,
        speculative_config=speculation,
        seed=0,
        block_size=32,
        distributed_executor_backend="mp",
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for fault in given.rounds:
        is_hot = fault.startswith("T=")
        kind, _, at = ("", "", "") if is_hot else fault.partition("@")
        temperature = float(fault.removeprefix("T=")) if is_hot else 0.0
        sampling = SamplingParams(temperature=temperature, max_tokens=given.tokens, ignore_eos=True)
        llm.collective_rpc("specsync_arm", args=(kind, at))
        started = time.perf_counter()
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        ours, theirs = llm.collective_rpc("specsync_arm", args=("", ""))
        differing = sum(one != other for one, other in zip_longest(ours, theirs))
        steps = {"steps": max(len(ours), len(theirs)), "differing": differing}
        say("ROUND", {"fault": fault, "tokens": tokens, "seconds": seconds, **steps})
    say("STATS", llm.collective_rpc("specsync_stats"))
    counts = {
        metric.name: getattr(metric, "value", None) for metric in llm.get_metrics() if "spec_decode" in metric.name
    }
    say("ACCEPTED", {name: value for name, value in counts.items() if value is not None})


def say(what: str, value: object) -> None:
    print(what, json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
