"""One engine that serves what standard input asks for: a JSON line in, a JSON line out. Started by `matrix.py`."""

from __future__ import annotations

import json
import sys
import time
import zlib
from pathlib import Path

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
SIZES: dict[str, dict[str, int]] = {
    "small": {},
    "large": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 32,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
"""``small`` is bound by the host: what is measured is Python. ``large`` has the layers of a model of 70 billion
parameters, 32 of 80: a decode step is bound by the GPUs, as a served model's is."""
LAYERS = {"mask_token_id": 31999, "target_layer_ids": [2, 8]}
SERVER = {
    "load_format": "dummy",
    "tp_size": 2,
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.9,
    "max_total_tokens": 16384,
    "max_running_requests": 16,
    "dtype": "bfloat16",
    "log_level": "info",
    "skip_server_warmup": True,
    "random_seed": 1,
    "grammar_backend": "none",
    "watchdog_timeout": 300,
    "disable_radix_cache": True,
    "disable_prefill_cuda_graph": True,
}


def models(size: str, layers: int | None) -> dict[str, dict[str, object]]:
    """The configuration of the target and of each algorithm's draft model.

    Args:
        layers: of the target; None are those of the size.
    """
    target: dict[str, object] = {**TARGET, **SIZES[size]}
    target |= {} if layers is None else {"num_hidden_layers": layers}
    block = {**target, "num_hidden_layers": 2, "num_target_layers": target["num_hidden_layers"]}
    block |= {"attention_bias": False}
    dspark = {"architectures": ["DSparkDraftModel"], "markov_rank": 64, "markov_head_type": "vanilla"}
    return {
        "target": target,
        "dspark": {**block, **dspark, "block_size": 5, "dflash_config": {**LAYERS, "block_size": 5}},
        "dflash": {
            **block,
            "architectures": ["DFlashDraftModel"],
            "block_size": 8,
            "dflash_config": {**LAYERS, "block_size": 8},
        },
        "eagle": {**target, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1},
    }


def main() -> None:
    import sglang

    given = json.loads(sys.argv[1])
    folder = Path(sys.argv[2])
    for name, config in models(**given.pop("shape")).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    if "speculative_draft_model_path" in given:
        given["speculative_draft_model_path"] = str(folder / given["speculative_draft_model_path"])
    started = time.monotonic()
    engine = sglang.Engine(**SERVER | {"model_path": str(folder / "target")} | given)
    answer({"started_s": time.monotonic() - started})
    for line in sys.stdin:
        answer(serve(engine, **json.loads(line)))
    engine.shutdown()


def serve(engine: object, *, batch: int, tokens: int, temperature: float) -> dict[str, object]:
    prompts = [[5 + index, 6, 7 * index + 3, 8, 9] for index in range(batch)]
    sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    started = time.monotonic()
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    seconds = time.monotonic() - started
    texts = [answer["output_ids"] for answer in answers]
    steps = max(answer["meta_info"].get("spec_verify_ct") or 0 for answer in answers)
    digest = f"{zlib.crc32(json.dumps(texts).encode()):08x}"
    return {"tokens_per_s": sum(map(len, texts)) / seconds, "seconds": seconds, "steps": steps, "digest": digest}


def answer(value: dict[str, object]) -> None:
    print("ANSWER " + json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
