"""The decoder-only transformer: embedding, layers, final norm, head. Families say what a layer is.

Owns: the residual stream and the order in which weights are read. Knows nothing of requests,
sampling or files. Made by the loader, called by the worker's model runner.

Each norm is fused with the addition before it, so a layer ends with the *next* layer's input norm
(or the final one), which the decoder hands to it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trimaran.formats.architecture import ModelArchitecture
from trimaran.model.kernels.base import AttentionMetadata, Kernels
from trimaran.model.layers.embedding import Embedding
from trimaran.model.layers.rotary import RotaryEmbedding
from trimaran.model.weights import Weights

_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class GivenEmbeddings:
    """Rows that stand instead of the embeddings of some tokens of a step."""

    places: torch.Tensor  # int64 [G]: which of the step's tokens
    rows: torch.Tensor  # [G, hidden_size]: what the first layer sees, so after any scaling


class CausalLM(Protocol):
    """What the worker holds. T tokens lie one after another; kv_caches and metadata go by layer
    (layers of one KV group share the objects)."""

    architecture: ModelArchitecture
    weight_bytes: int  # held when loading is done, packed copies counted

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
        given: GivenEmbeddings | None = None,
        on_layer: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """input_ids, positions int64 [T] -> hidden states after the final norm [T, hidden_size].

        ``on_layer`` is called after each layer: a long pass shows that it goes on."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> fp32 [R, vocab_size], in memory that the next call may reuse."""
        ...


class DecoderLayer(Protocol):
    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        next_norm: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """``hidden`` is normed input, ``residual`` the fp32 stream, updated in place; both [T, N].
        Returns the stream normed with ``next_norm``."""
        ...


class DecoderForCausalLM(ABC):
    def __init__(self, architecture: ModelArchitecture, weights: Weights, kernels: Kernels) -> None:
        self.architecture = architecture
        self._kernels = kernels
        hidden = architecture.hidden_size
        # The largest first, the head before all: while it is packed, there are two copies of it.
        tied = architecture.tie_word_embeddings and not weights.differ(_HEAD, _TABLE)
        rows = architecture.vocab_size
        head = None if tied else weights.linear({"lm_head": rows}, hidden, bias=False)
        table = weights.matrix(_TABLE, rows, hidden)
        self._embedding = Embedding(table, architecture.embedding_scale)
        self._head = weights.tied_linear(table) if head is None else head
        rotary = {
            kind: RotaryEmbedding(architecture.rope[kind], architecture.head_dim)
            for kind in set(architecture.layer_types)
        }
        prefixes = [f"model.layers.{index}" for index in range(architecture.num_layers)]
        self._layers = [
            self.layer(weights, prefix, rotary[kind])
            for prefix, kind in zip(prefixes, architecture.layer_types, strict=True)
        ]
        norms = [f"{prefix}.input_layernorm.weight" for prefix in prefixes] + ["model.norm.weight"]
        self._norms = [weights.norm(name, hidden) for name in norms]
        self.weight_bytes = weights.held_bytes

    @abstractmethod
    def layer(self, weights: Weights, prefix: str, rotary: RotaryEmbedding) -> DecoderLayer:
        """One layer of this family, its weights read from ``prefix``."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
        given: GivenEmbeddings | None = None,
        on_layer: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """See CausalLM."""
        embedded = self._embedding(input_ids)
        if given is not None:
            embedded[given.places] = given.rows.to(embedded.dtype)
        residual = embedded.to(torch.float32, copy=True)
        hidden = self._kernels.rms_norm(embedded, self._norms[0], self.architecture.rms_norm_eps)
        for layer, next_norm, kv_cache, where in zip(
            self._layers, self._norms[1:], kv_caches, metadata, strict=True
        ):
            hidden = layer(hidden, residual, next_norm, positions, kv_cache, where)
            on_layer()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See CausalLM."""
        return self._head(hidden, wide=True)
