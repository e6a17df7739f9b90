"""A tiny random Llama, so that only the serving stack costs time.

Owns: the checkpoint that `trimaran bench` and tests serve: 2 layers, hidden 128, 4 heads (2 KV) of
32, ffn 256, vocabulary 2048, untied, bf16, a byte-level tokenizer and a chat template. Needs numpy
and tokenizers only. The text it writes is noise.
"""

import json
import struct
from pathlib import Path

import numpy as np

VOCAB_SIZE, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 2048, 128, 2, 4, 2, 32, 256
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint into ``folder`` (made if absent) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_safetensors_bf16(folder / "model.safetensors", _weights(seed))
    return folder


def _weights(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return generator.normal(0.0, 0.02, shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": random(VOCAB_SIZE, HIDDEN),
        "lm_head.weight": random(VOCAB_SIZE, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def write_safetensors_bf16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 arrays as bfloat16 (rounded to nearest even) in the safetensors format.

    Format: u64 length, JSON header with dtype, shape and byte range of each tensor, the bytes.
    """
    header: dict[str, object] = {}
    chunks: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        bits = tensor.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(rounded)],
        }
        offset += len(rounded)
        chunks.append(rounded)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(chunks))


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Any text does, as long as it is the same everywhere and rich enough for 2048 pieces.
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(generator.choice(letters, generator.integers(2, 9))) for _ in range(4000)]
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": 4096,
                "bos_token": "<s>",
                "eos_token": "</s>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
