"""Small GGUF files for the tests, written by the gguf package (not by our own code)."""

import gguf
import numpy as np

VOCAB = ["<unk>", "<s>", "</s>", "a", "b", "<|im_end|>", "<end_of_turn>", "c"]
TOKEN_TYPES = [2, 3, 3, 1, 1, 3, 1, 1]  # <end_of_turn> is an ordinary token here


def write_gguf(path, architecture, entries=(), tensors=None, **writer_options):
    """A file with ``entries`` (full keys) and ``tensors`` (name -> array, or (bytes, type))."""
    writer = gguf.GGUFWriter(path, architecture, **writer_options)
    for key, value in dict(entries).items():
        _add(writer, key, value)
    for name, tensor in (tensors or {}).items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def model_entries(architecture, **changes):
    """Metadata of a model of 2 layers, hidden size 32, 4 heads (2 KV) of 8, vocabulary of 8."""
    entries = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 2.0**-20,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return {
        **{f"{architecture}.{key}": v for key, v in entries.items() if v is not None},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": VOCAB,
        "tokenizer.ggml.token_type": TOKEN_TYPES,
        "tokenizer.ggml.scores": [0.0] * len(VOCAB),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def model_tensors(architecture, *, seed=0, vocab_size=8, head_dim=8):
    """Random weights for ``model_entries``."""
    random = np.random.default_rng(seed)
    shapes = {"token_embd": (vocab_size, 32), "output_norm": (32,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (32,),
                "attn_q": (4 * head_dim, 32),
                "attn_k": (2 * head_dim, 32),
                "attn_v": (2 * head_dim, 32),
                "attn_output": (32, 4 * head_dim),
                "ffn_norm": (32,),
                "ffn_gate": (48, 32),
                "ffn_up": (48, 32),
                "ffn_down": (32, 48),
            }.items()
        }
        if architecture in ("qwen3", "gemma3"):
            shapes |= {f"blk.{layer}.attn_{n}_norm": (head_dim,) for n in "qk"}
        if architecture == "gemma3":
            shapes |= {f"blk.{layer}.{n}": (32,) for n in ("post_attention_norm", "post_ffw_norm")}
    return {
        f"{name}.weight": random.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }
