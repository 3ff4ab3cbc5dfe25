"""Tiny random models for a vLLM engine on CPU: targets, a draft model, and heads for EAGLE, EAGLE-3, MTP and DFlash.

    python models.py FOLDER            what the tests serve
    python models.py FOLDER wide       a target of 190 million parameters, whose steps take as long as its weights do

Run by the engine's own Python. The heads of EAGLE, EAGLE-3 and MTP repeat the token that the target has just predicted,
and the draft model is the target with noise on its weights, so that some of their drafts are accepted; DFlash's head is
random, and nothing of it is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY, HIDDEN, MLP, HEADS, KV_HEADS, HEAD = 512, 256, 512, 4, 2, 64
NOISE = 0.001
"""On the draft model's weights, whose own standard deviation is 0.02."""


def main() -> None:
    folder = Path(sys.argv[1])
    if "wide" in sys.argv[2:]:
        make_llama(folder / "wide", layers=12, seed=0, hidden=1024, mlp=4096)
        return
    make_llama(folder / "target", layers=2, seed=0)
    make_draft(folder / "draft", folder / "target")
    torch.manual_seed(7)
    base = json.loads((folder / "target" / "config.json").read_text())
    make_eagle(folder / "eagle", base)
    head = load_file(folder / "target" / "model.safetensors")["lm_head.weight"]
    make_eagle3(folder / "eagle3", base, head)
    make_dflash(folder / "dflash")
    make_mimo(folder / "mimo")
    make_llama(folder / "deep", layers=3, seed=3)  # the V2 runner hands EAGLE-3 what goes into layers 0, 1 and 2


def make_llama(path: Path, layers: int, seed: int, hidden: int = HIDDEN, mlp: int = MLP) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD // (HEADS // KV_HEADS),
        head_dim=HEAD,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    save_tokenizer(path)


def make_draft(path: Path, target: Path) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.add_(noise(*weight.shape, size=NOISE))
    model.save_pretrained(path)
    save_tokenizer(path)


def save_tokenizer(path: Path) -> None:
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(path)


def noise(*shape: int, size: float = 0.02) -> torch.Tensor:
    return (torch.randn(*shape) * size).to(torch.bfloat16)


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bfloat16)


def layer(
    prefix: str, norms: tuple[str, ...], width: int = HIDDEN, head_norms: bool = False
) -> dict[str, torch.Tensor]:
    attention = f"{prefix}.self_attn"
    weights = {
        f"{attention}.q_proj.weight": noise(HEADS * HEAD, width),
        f"{attention}.k_proj.weight": noise(KV_HEADS * HEAD, width),
        f"{attention}.v_proj.weight": noise(KV_HEADS * HEAD, width),
        f"{attention}.o_proj.weight": noise(HIDDEN, HEADS * HEAD),
        f"{prefix}.mlp.gate_proj.weight": noise(MLP, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": noise(MLP, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": noise(HIDDEN, MLP),
    }
    weights |= {f"{prefix}.{name}.weight": ones(HIDDEN) for name in norms}
    if head_norms:
        weights |= {f"{attention}.{name}.weight": ones(HEAD) for name in ("q_norm", "k_norm")}
    return weights


def save(path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})


def make_eagle(path: Path, base: dict[str, Any]) -> None:
    """``fc`` passes the target's hidden state, and the layer adds nothing to it."""
    weights = layer("layers.0", ("post_attention_layernorm",))
    weights["fc.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1).to(torch.bfloat16)
    weights["layers.0.self_attn.o_proj.weight"].zero_()
    weights["layers.0.mlp.down_proj.weight"].zero_()
    save(path, base | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}, weights)


def make_eagle3(path: Path, base: dict[str, Any], lm_head: torch.Tensor) -> None:
    """``fc`` passes the last of the target's three hidden states, and the layer adds nothing to it."""
    config = base | {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCABULARY,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    weights = layer("midlayer", ("input_layernorm", "post_attention_layernorm", "hidden_norm"), 2 * HIDDEN)
    weights["midlayer.self_attn.o_proj.weight"].zero_()
    weights["midlayer.mlp.down_proj.weight"].zero_()
    passed = [torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)]
    weights |= {
        "fc.weight": torch.cat(passed, 1).to(torch.bfloat16),
        "norm.weight": ones(HIDDEN),
        "lm_head.weight": lm_head,
    }
    save(path, config, weights)


def make_dflash(path: Path) -> None:
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "block_size": 4,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]},
        "num_target_layers": 2,
    }
    weights = {}
    for index in range(2):
        weights |= layer(f"layers.{index}", ("input_layernorm", "post_attention_layernorm"), head_norms=True)
    weights |= {"fc.weight": noise(HIDDEN, 2 * HIDDEN, size=0.05), "hidden_norm.weight": ones(HIDDEN)}
    save(path, config, weights | {"norm.weight": ones(HIDDEN)})


def make_mimo(path: Path) -> None:
    """MiMo: Qwen 2 with a layer for one more token in the same checkpoint. That layer passes the hidden state on."""
    torch.manual_seed(9)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    save_tokenizer(path)
    target = load_file(path / "model.safetensors")
    extra = "model.mtp_layers.0"
    norms = ("input_layernorm", "post_attention_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm")
    weights = layer(extra, norms)
    for name, width in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        weights[f"{extra}.self_attn.{name}_proj.bias"] = torch.zeros(width * HEAD, dtype=torch.bfloat16)
    weights[f"{extra}.input_proj.weight"] = torch.eye(HIDDEN, 2 * HIDDEN).to(torch.bfloat16)
    weights[f"{extra}.self_attn.o_proj.weight"].zero_()
    weights[f"{extra}.mlp.down_proj.weight"].zero_()
    base = json.loads((path / "config.json").read_text())
    save(path, base | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}, target | weights)


if __name__ == "__main__":
    main()
