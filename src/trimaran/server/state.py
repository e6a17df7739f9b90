"""What all routes of one API server share.

Owns: whether requests can be served now, and under which model names. Does not know how engines
are started: main.py sets ``llm`` once it is connected, and the launch side tells the phase.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from trimaran.client.async_llm import AsyncLLM
from trimaran.config import Config
from trimaran.errors import ModelNotFoundError, UnavailableError
from trimaran.messages import DeploymentState
from trimaran.metrics.recorder import MetricsRecorder
from trimaran.server.limits import Admission
from trimaran.server.request_book import RequestBook

# Names the packaged demo model answers to.
DEMO_NAMES = ("demo", "gemma-3-270m")


@dataclass
class ServerState:
    """Lives on the event loop of one API server."""

    config: Config
    # The names requests may use; the first is the one that answers carry.
    model_names: tuple[str, ...]
    metrics: MetricsRecorder
    admission: Admission
    requests: RequestBook
    deployment: Callable[[], DeploymentState]  # what the supervisor last said
    llm: AsyncLLM | None = None  # None until the client has connected
    draining: bool = False  # shutting down: running requests end, new ones are refused

    @classmethod
    def create(cls, config: Config, deployment: Callable[[], DeploymentState]) -> Self:
        model = config.model
        names = model.served_model_name or (DEMO_NAMES if model.model == "demo" else (model.model,))
        metrics = MetricsRecorder(names[0])
        admission = Admission(config.server.max_queued_requests, metrics)
        requests = RequestBook(log_requests=config.observability.log_requests)
        return cls(config, names, metrics, admission, requests, deployment)

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
        return self.deployment().failure is not None

    @property
    def is_ready(self) -> bool:
        return (
            not self.draining
            and not self.has_given_up
            and self.llm is not None
            and self.llm.is_ready
            and self.deployment().ready
        )

    @property
    def sleep_phase(self) -> str | None:
        """See ``AsyncLLM.sleep_phase``: requests are accepted then, and wait."""
        return self.llm.sleep_phase if self.llm is not None else None

    def progress(self) -> tuple[str, float]:
        """(phase, percent of the start-up)."""
        if self.draining:
            return "shutting down", 100.0
        if self.has_given_up:
            return "failed", 100.0
        deployment = self.deployment()
        if deployment.ready and not self.is_ready:
            return "connecting", 99.0
        if self.sleep_phase is not None:
            return self.sleep_phase, 100.0
        return deployment.phase, deployment.percent

    def serving_llm(self) -> AsyncLLM:
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
