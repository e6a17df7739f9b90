"""One worker: a model on this machine's cores, from its files to its tokens.

Owns: the order of start-up, what the files and the machine settle (types, threads, memory), and the
parts that compute. Knows nothing of scheduling. Called by ``executor/inproc``.
"""

import logging
from collections.abc import Callable
from typing import Literal

import torch

from trimaran.config import EngineConfig
from trimaran.errors import CheckpointError, ConfigError
from trimaran.formats.checkpoint import ModelSource
from trimaran.formats.hub import locate_model
from trimaran.formats.model_source import open_model
from trimaran.messages import (
    KVCacheConfig,
    KVCacheLayout,
    ModelFacts,
    ModelRunnerOutput,
    SchedulerOutput,
)
from trimaran.model.kernels.base import Kernels
from trimaran.model.kernels.select import select_kernels
from trimaran.model.loader import load_model
from trimaran.model.models.decoder import CausalLM
from trimaran.scheduling.kv_layout import make_kv_cache_layout
from trimaran.worker.device import allowed_threads, free_memory_bytes, return_freed_memory
from trimaran.worker.kv_tensors import allocate_kv_caches
from trimaran.worker.model_runner import ModelRunner
from trimaran.worker.profiling import Recorder
from trimaran.worker.vocabulary import num_known_tokens
from trimaran.worker.warm_up import warm_up_plans

logger = logging.getLogger(__name__)

_MIB = 1 << 20
# A float16 file is computed in bfloat16: as small, and what CPUs multiply fast. Its three lost bits
# are kept by --dtype float32, at twice the memory.
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.bfloat16,
    "float32": torch.float32,
}


class Worker:
    """Calls come in the order of ``executor.base.Executor``, which says what they raise."""

    def __init__(self, config: EngineConfig, on_unit: Callable[[int], None]) -> None:
        self._config = config
        self._on_unit = on_unit
        self._device = torch.device("cpu")
        self._recorder = Recorder(config.observability.profile_dir)
        # None or empty while asleep. Nothing else may hold them, or the memory does not come back.
        self.model: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self.kv_caches: list[torch.Tensor] = []

    def load(self, on_progress: Callable[[str, float, str], None]) -> ModelFacts:
        """Read the weights and take stock; on_progress as ``executor.base.ProgressCallback``."""
        config = self._config
        threads = allowed_threads(config.executor.threads)
        torch.set_num_threads(threads.count)
        self._path = locate_model(
            config.model.model,
            revision=config.model.revision,
            download_dir=config.model.download_dir,
            offline=config.model.offline,
        )
        source = open_model(self._path)
        self._shape = shape = source.architecture
        asked = config.model.dtype
        self._dtype = _DTYPES[shape.file_dtype if asked == "auto" else asked]
        self._kernels = kernels = self._select_kernels(shape.head_dim)
        self.model = self._read_weights(source, on_progress)
        self._num_known_tokens = num_known_tokens(source.tokenizer, shape.vocab_size)
        facts = ModelFacts(
            layout=self._kv_layout(),
            vocab_size=shape.vocab_size,
            max_model_len=shape.max_position_embeddings,
            dtype=str(self._dtype).removeprefix("torch."),
            weight_bytes=self.model.weight_bytes,
            available_kv_bytes=free_memory_bytes(),
            num_threads=threads.count,
            kernels=kernels.name,
            hidden_size=shape.hidden_size,
        )
        logger.info(
            "%s: %d MiB of %s weights, %s kernels, %d threads (%s), %d MiB of memory free",
            config.model.model,
            facts.weight_bytes // _MIB,
            facts.dtype,
            facts.kernels,
            threads.count,
            threads.reason,
            facts.available_kv_bytes // _MIB,
        )
        return facts

    def _read_weights(
        self, source: ModelSource, on_progress: Callable[[str, float, str], None]
    ) -> CausalLM:
        def on_bytes(done: int, total: int) -> None:
            detail = f"{done // _MIB} of {total // _MIB} MiB"
            on_progress("loading", done / max(1, total), detail)

        with torch.inference_mode():
            return load_model(
                source, dtype=self._dtype, kernels=self._kernels, on_progress=on_bytes
            )

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        assert self.model is not None, "no weights are loaded"
        self._kv_config = config
        self.kv_caches = allocate_kv_caches(
            config, self._shape.num_kv_heads, self._shape.head_dim, self._dtype
        )
        self._runner = ModelRunner(
            self.model,
            self.kv_caches,
            config.layout,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            num_known_tokens=self._num_known_tokens,
            on_unit=self._on_unit,
        )

    def warm_up(self, on_progress: Callable[[str, float, str], None]) -> None:
        plans = warm_up_plans(
            self._kv_config,
            self._config.scheduler,
            max_model_len=self._shape.max_position_embeddings,
        )
        for done, plan in enumerate(plans, 1):
            self.execute(plan)
            on_progress("warming up", done / len(plans), "")

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        assert self._runner is not None, "a plan came before the KV cache, or during sleep"
        return self._runner.execute(plan)

    def sleep(self, level: int) -> None:
        self._runner = None
        self.kv_caches = []
        if level == 2:
            self.model = None
        return_freed_memory()

    def wake_up(self, on_progress: Callable[[str, float, str], None]) -> None:
        if self.model is None:
            source = open_model(self._path)
            if source.architecture != self._shape:
                raise CheckpointError(
                    "holds a model of another shape than at the start",
                    file=str(self._path),
                    hint="put the first one back, or start anew",
                )
            self.model = self._read_weights(source, on_progress)
        self.initialize_kv_cache(self._kv_config)

    def profile(self, action: Literal["start", "stop"]) -> str:
        return str(self._recorder.start() if action == "start" else self._recorder.stop())

    def close(self) -> None:
        """End a recording that nobody stopped: the profiler is the whole process's."""
        self._recorder.close()

    def _select_kernels(self, head_dim: int) -> Kernels:
        kernels = select_kernels(self._config.executor.kernels, self._device)
        if self._config.model.batch_invariant and not kernels.is_batch_invariant(head_dim):
            raise ConfigError(
                "--batch-invariant needs the compiled kernels and a head size that is a multiple"
                f" of 16 up to 256: here {kernels.name} kernels meet heads of {head_dim}",
                hint="leave out --kernels torch, or install with a C++ compiler",
            )
        return kernels

    def _kv_layout(self) -> KVCacheLayout:
        shape = self._shape
        return make_kv_cache_layout(
            [
                (kind, shape.sliding_window if kind == "sliding" else 0)
                for kind in shape.layer_types
            ],
            block_size=self._config.cache.block_size,
            bytes_per_layer_token=2 * shape.num_kv_heads * shape.head_dim * self._dtype.itemsize,
        )
