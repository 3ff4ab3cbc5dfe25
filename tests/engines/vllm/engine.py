"""Run vLLM on two CPU ranks and print what it generates; run by the engine's own Python.

    python engine.py JOB_JSON      one engine, started as a user's is
    python engine.py --serve       a job on each line of stdin, each in a process forked from this one

A start takes far longer than what is served, and nearly all of it is imports. With ``--serve`` the engine's modules are
imported once, and every engine is started from a fork of that state; its workers are forks too, as they are on GPUs.

A round serves three requests: ``""``, a fault on rank 1 in the verify steps behind the ``@`` (``tok@4``), a
temperature (``T=0.7``), or both, with a space between. Lines on stdout: ``ROUND`` with their tokens, the seconds, the
number of steps, how many of these fed the two ranks' models differently, and how many decisions differed; ``STATS``
with what each worker counted; ``ACCEPTED`` with the engine's own counts of drafted and accepted tokens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from itertools import zip_longest
from typing import Any, NoReturn

PROMPTS = ([5, 6, 7, 8] * 6, [100, 101, 102] * 8, list(range(20, 44)))
"""The first two repeat, so that n-grams match."""
RUNNERS = {
    "V1": (
        *("vllm.v1.worker.cpu_worker", "vllm.v1.spec_decode.ngram_proposer", "vllm.model_executor.models.qwen2"),
        *("vllm.v1.spec_decode.suffix_decoding", "vllm.model_executor.models.llama_eagle3"),
        *("vllm.model_executor.models.mimo_mtp", "vllm.model_executor.models.qwen3_dflash"),
    ),
    "V2": (
        *(
            "vllm.v1.worker.cpu_worker",
            "vllm.v1.worker.gpu.model_runner",
            "vllm.v1.worker.gpu.spec_decode.eagle.speculator",
        ),
        "vllm.model_executor.models.mimo_mtp",
    ),
}
EVERY = (
    *("vllm", "vllm.v1.engine.core", "vllm.v1.engine.llm_engine", "vllm.v1.executor.multiproc_executor"),
    *("vllm.model_executor.models.llama", "vllm.model_executor.models.llama_eagle"),
)


def run(job: dict[str, Any]) -> None:
    """Start an engine, serve the job's rounds, and say what came of them."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        tensor_parallel_size=2,
        max_model_len=job["max_len"],
        max_num_seqs=8,
        dtype="bfloat16",
        enforce_eager=True,
        speculative_config=job["speculation"],
        seed=0,
        block_size=32,
        distributed_executor_backend="mp",
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    prompts = [{"prompt_token_ids": prompt * job["prompt_times"]} for prompt in PROMPTS]
    told = 0
    for wanted in job["rounds"]:
        fault, temperature = "", 0.0
        for part in wanted.split():
            if part.startswith("T="):
                temperature = float(part.removeprefix("T="))
            else:
                fault = part
        kind, _, at = fault.partition("@")
        sampling = SamplingParams(temperature=temperature, max_tokens=job["tokens"], ignore_eos=True)
        llm.collective_rpc("specsync_arm", args=(kind, at))
        started = time.perf_counter()
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        ours, theirs = (worker["fed"] for worker in llm.collective_rpc("specsync_arm", args=("", "")))
        differing = sum(one != other for one, other in zip_longest(ours, theirs))
        stats = llm.collective_rpc("specsync_stats")
        counted = sum(site["mismatched_calls"] for worker in stats for site in worker["stats"].values())
        counts = {"steps": max(len(ours), len(theirs)), "differing": differing, "decisions": counted - told}
        told = counted
        say("ROUND", {"fault": wanted, "tokens": tokens, "seconds": seconds, **counts})
    say("STATS", llm.collective_rpc("specsync_stats"))
    counts = {
        metric.name: getattr(metric, "value", None) for metric in llm.get_metrics() if "spec_decode" in metric.name
    }
    say("ACCEPTED", {name: value for name, value in counts.items() if value is not None})


def say(what: str, value: object) -> None:
    print(what, json.dumps(value), flush=True)


def serve() -> None:
    """Import the engine, then fork for each job; answer each with the process group to end."""
    preload(EVERY)
    replace_kernels_now()
    preload(RUNNERS["V2" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else "V1"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends is gone, and the caller sees that
    say("READY", os.getpid())
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            in_child(job)
        say("FORKED", child)


def preload(names: tuple[str, ...]) -> None:
    for name in names:
        with suppress(ImportError):  # another version has other modules: only the start takes longer
            import_module(name)


def replace_kernels_now() -> None:
    """A worker does so before it imports more, and the search through all modules stumbles over some of those."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if hasattr(platform, "register_triton_kernel_overrides"):  # 0.24.0 has none
        platform.register_triton_kernel_overrides()
        platform.register_triton_kernel_overrides = staticmethod(lambda: None)


def in_child(job: dict[str, Any]) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(job["environ"], SHIM_FORK="1")
    status = 1
    try:
        run(job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    serve() if sys.argv[1] == "--serve" else run(json.loads(sys.argv[1]))
