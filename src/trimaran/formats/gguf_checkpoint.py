"""The weights of a GGUF file under the names, and in the row order, of Hugging Face checkpoints.

Owns: the name table, undoing the row permutation of q and k (the "llama" architecture only), and
reading rows. Fulfils the protocol of checkpoint.py. Called by model_source.
"""

from dataclasses import dataclass

import numpy as np

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import ModelArchitecture
from trimaran.formats.gguf import GgufFile, GgufTensor
from trimaran.formats.gguf_dequantize import dequantize

ROPE_FREQUENCIES = "rope_freqs.weight"  # part of the architecture, not a weight
_PLAIN_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 has four norms in a layer.
_LAYER_GEMMA3 = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class GgufTensorSource:
    """One tensor. ``row_order[i]`` is the row of the file that is row i of the tensor."""

    name: str
    stored: GgufTensor
    row_order: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def stored_bytes(self) -> int:
        return self.stored.stored_bytes

    @property
    def read_dtype(self) -> str:
        return self.stored.type.plain_dtype

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        shape, kind = self.shape, self.stored.type
        start, stop, _ = slice(start, stop).indices(shape[0])
        if kind.decode and len(shape) == 1:  # rows are narrower than a block
            blocks = self._bytes(0, 1, 1).reshape(-1, kind.block_bytes)
            return dequantize(blocks, kind).reshape(-1)[start:stop]
        if self.row_order is None:
            raw = self._bytes(start, stop, shape[0])
        else:
            raw = self._bytes(0, shape[0], shape[0]).reshape(shape[0], -1)
            raw = raw[self.row_order[start:stop]].reshape(-1)
        rows = (max(stop - start, 0), *shape[1:])
        if kind.decode:
            return dequantize(raw.reshape(-1, kind.block_bytes), kind).reshape(rows)
        return raw.view(_PLAIN_DTYPES[kind.plain_dtype]).reshape(rows)

    def _bytes(self, start: int, stop: int, num_rows: int) -> np.ndarray:
        row_bytes = self.stored.stored_bytes // num_rows
        length = max(stop - start, 0) * row_bytes
        return self.stored.file.view(self.stored.offset + start * row_bytes, length)


class GgufCheckpoint:
    """Weights of ``gguf`` by Hugging Face name. Raises CheckpointError: a tensor it cannot name."""

    def __init__(self, gguf: GgufFile, architecture: ModelArchitecture) -> None:
        self._gguf = gguf
        self._architecture = architecture
        self._layers = {str(layer) for layer in range(architecture.num_layers)}
        self._stored: dict[str, GgufTensor] = {}
        for name, tensor in gguf.tensors.items():
            if name != ROPE_FREQUENCIES:
                self._stored[self._hugging_face_name(name)] = tensor

    def names(self) -> list[str]:
        return list(self._stored)

    def tensor(self, name: str) -> GgufTensorSource:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(
                "no such tensor in the file", file=str(self._gguf.path), tensor=name
            )
        order = None
        if self._gguf.metadata.get("general.architecture") == "llama":
            if ".q_proj." in name:
                order = self._unpermuted(stored, self._architecture.num_heads)
            elif ".k_proj." in name:
                order = self._unpermuted(stored, self._architecture.num_kv_heads)
        return GgufTensorSource(name, stored, order)

    def close(self) -> None:
        self._gguf.close()

    def _hugging_face_name(self, name: str) -> str:
        table = _LAYER_GEMMA3 if self._architecture.family == "gemma3_text" else _LAYER
        body, _, suffix = name.rpartition(".")
        mapped = _TOP.get(body)
        if body.startswith("blk."):
            layer, _, part = body.removeprefix("blk.").partition(".")
            if layer in self._layers and part in table:
                mapped = f"model.layers.{layer}.{table[part]}"
        if mapped is None or suffix not in ("weight", "bias"):
            raise CheckpointError(
                f"is not part of a {self._architecture.family} model",
                file=str(self._gguf.path),
                tensor=name,
                hint="the file belongs to a model that is not supported",
            )
        return f"{mapped}.{suffix}"

    def _unpermuted(self, stored: GgufTensor, num_heads: int) -> np.ndarray:
        """Rows of a head lie in the file as 0, D/2, 1, D/2 + 1 …; the order that undoes it."""
        rows = stored.shape[0]
        if rows != num_heads * self._architecture.head_dim:
            raise CheckpointError(
                f"has {rows} rows, not {num_heads} heads of {self._architecture.head_dim}",
                file=str(self._gguf.path),
                tensor=stored.name,
            )
        return np.arange(rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
