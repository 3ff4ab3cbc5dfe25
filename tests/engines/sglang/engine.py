"""Start the real engine on two CPU ranks, serve a few rounds, and print the tokens as JSON, one line a round.

    python engine.py '{"speculative_algorithm": "NGRAM", ...}' --rounds 3:0 1:0 1:1.5 --tokens 24 --temperature 0

A round is a number of prompts and the shim's fault on rank 1; every round begins from the same state of the random
generators.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
BLOCK_DRAFT = {
    **TARGET,
    "num_hidden_layers": 1,
    "num_target_layers": 4,
    "attention_bias": False,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
}
MODELS = {
    "target": TARGET,
    "dspark": {
        **BLOCK_DRAFT,
        "architectures": ["DSparkDraftModel"],
        "block_size": 3,
        "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 1], "block_size": 3},
    },
    "dflash": {
        **BLOCK_DRAFT,
        "architectures": ["DFlashDraftModel"],
        "block_size": 4,
        "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 1], "block_size": 4},
    },
    "eagle": {**TARGET, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1},
}
"""Configurations only: the weights are dummies."""

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [7] * 6]
SERVER = {
    "load_format": "dummy",
    "device": "cpu",
    "tp_size": 2,
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "dtype": "float32",
    "log_level": "info",
    "skip_server_warmup": True,
    "random_seed": 1,
    "grammar_backend": "none",
    "watchdog_timeout": 60,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arguments", type=json.loads)
    parser.add_argument("--rounds", nargs="+", help="PROMPTS:FAULT, as the shim has it")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--spawn", action="store_true", help="start processes as the engine does; half a minute longer")
    options = parser.parse_args()
    if not options.spawn:
        take_processes_from_a_fork_server()
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        engine = sglang.Engine(
            **SERVER | {"model_path": model(folder, "target")} | arguments(folder, options.arguments)
        )
        print("READY", flush=True)
        sampling = {"temperature": options.temperature, "max_new_tokens": options.tokens, "ignore_eos": True}
        for number, (count, fault) in enumerate(one.split(":") for one in options.rounds):
            Path(os.environ["SHIM_ROUND"]).write_text(f"{number} {fault}")  # nothing runs: all ranks read it next
            answers = engine.generate(input_ids=PROMPTS[: int(count)], sampling_params=sampling)
            print("ROUND", json.dumps([answer["output_ids"] for answer in answers]), flush=True)
        engine.shutdown()


def take_processes_from_a_fork_server() -> None:
    """Let the engine's processes start from one that has imported the engine, and nothing more of it was run there.

    As after the engine's own spawn, each loads its plugins itself; only the imports are shared, 20 seconds of them.
    """
    multiprocessing.set_forkserver_preload(["sglang.srt.managers.scheduler", "sglang.srt.models.registry"])
    forkserver.ensure_running()  # it imports while this process does
    multiprocessing.set_start_method = lambda *_, **__: None
    multiprocessing.Process = Forked


class Forked(ForkServerProcess):
    """A process with its parent's variables: the server has those of the time when it was started."""

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...] = (), **kwargs: Any) -> None:
        super().__init__(target=run_with, args=(dict(os.environ), target, args, kwargs.pop("kwargs", {})), **kwargs)


def run_with(environ: dict[str, str], target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    os.environ.update(environ)
    return target(*args, **kwargs)


def arguments(folder: str, given: dict[str, object]) -> dict[str, object]:
    """The engine's arguments; a draft model is given by its name in `MODELS`."""
    draft = given.get("speculative_draft_model_path")
    return given if draft is None else given | {"speculative_draft_model_path": model(folder, str(draft))}


def model(folder: str, name: str) -> str:
    path = Path(folder) / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name]))
    return str(path)


if __name__ == "__main__":
    main()
