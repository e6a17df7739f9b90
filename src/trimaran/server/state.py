"""What all routes of one API server share.

Owns: whether requests can be served now, and under which model names. Does not know how engines
are started: main.py sets ``llm`` once it is connected, and the launch side tells the phase.
"""

from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from trimaran.client.outputs import RequestOutput
from trimaran.config import Config
from trimaran.errors import EngineDeadError, ModelNotFoundError, UnavailableError
from trimaran.formats.checkpoint import ModelSource
from trimaran.messages import ControlOperation, DeploymentState
from trimaran.metrics.recorder import MetricsRecorder
from trimaran.sampling_params import SamplingParams
from trimaran.server.limits import Admission

# Names the packaged demo model answers to.
DEMO_NAMES = ("demo", "gemma-3-270m")


class Tokenizer(Protocol):
    """What the server asks of ``trimaran.text.tokenizer.Tokenizer``."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class ServingLLM(Protocol):
    """What the server asks of ``trimaran.client.async_llm.AsyncLLM``; tests bring a fake."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> object | None: ...

    @property
    def source(self) -> ModelSource: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def dead_error(self) -> EngineDeadError | None: ...

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[int]: ...

    async def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> str: ...

    def generate(
        self, prompt: list[int], params: SamplingParams, *, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def control(self, operation: ControlOperation, *, timeout_s: float = 30) -> object: ...

    async def shutdown(self) -> None: ...


@dataclass
class ServerState:
    """Lives on the event loop of one API server."""

    config: Config
    metrics: MetricsRecorder
    admission: Admission
    deployment: Callable[[], DeploymentState]  # what the launch side last said
    llm: ServingLLM | None = None  # None until the client has connected
    failure: str | None = None  # why the client could not be built
    draining: bool = False  # shutting down: running requests end, new ones are refused

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names requests may use; the first is the one answers carry."""
        model = self.config.model
        if model.served_model_name:
            return model.served_model_name
        return DEMO_NAMES if model.model == "demo" else (model.model,)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. None means the served model.

        Raises ModelNotFoundError: another model was asked for.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ModelNotFoundError(
                f"the model {name[:100]!r} is not served here; this server has"
                f" {', '.join(self.model_names)}",
                param="model",
            )
        return name

    @property
    def has_given_up(self) -> bool:
        """Nothing will bring this deployment back without a restart."""
        if self.llm is not None and self.llm.dead_error is not None:
            return True
        return self.failure is not None or self.deployment().failure is not None

    @property
    def is_ready(self) -> bool:
        return (
            not self.draining
            and not self.has_given_up
            and self.llm is not None
            and self.llm.is_ready
            and self.deployment().ready
        )

    def progress(self) -> tuple[str, float]:
        """(phase, percent of the start-up)."""
        if self.draining:
            return "shutting down", 100.0
        if self.has_given_up:
            return "failed", 100.0
        deployment = self.deployment()
        if deployment.ready and not self.is_ready:
            return "connecting", 99.0
        return deployment.phase, deployment.percent

    def serving_llm(self) -> ServingLLM:
        """Raises UnavailableError, saying why, while requests cannot be served."""
        if self.llm is not None and self.is_ready:
            return self.llm
        phase, percent = self.progress()
        if self.draining:
            raise UnavailableError("the server is shutting down", retry_after_s=5)
        if self.has_given_up:
            raise UnavailableError(
                "the engine has ended and cannot serve; the server's log has the cause",
                retry_after_s=10,
            )
        raise UnavailableError(
            f"the model is not ready yet: {phase}, {percent:.0f} %; GET /ready tells when it is",
            retry_after_s=2,
        )
