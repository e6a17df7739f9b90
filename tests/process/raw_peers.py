"""Peers without manners: the far end of a client's links, or of an engine's, spoken by hand."""

import asyncio
import itertools

from trimaran.client.core_client import EngineCoreClient
from trimaran.config import EngineConfig
from trimaran.errors import EngineDeadError
from trimaran.ids import engine_identity
from trimaran.ipc.codec import Encoder
from trimaran.ipc.sockets import Context, Sent
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
)
from trimaran.sampling_params import SamplingParams

TIMEOUT_S = 20.0
INCARNATION = 4711


def ready_response(rank=0, incarnation=INCARNATION, **fields):
    found = {
        "num_kv_blocks": 10, "block_size": 16, "max_model_len": 100, "vocab_size": 50,
        "dtype": "float32", "kv_cache_bytes": 1, "weight_bytes": 1, "num_threads": 1,
        "kernels": "raw",
    }  # fmt: skip
    return EngineCoreReadyResponse(rank=rank, incarnation=incarnation, **(found | fields))


class RawEngine:
    """Sends whatever it is told to the one front end whose links it is given."""

    def __init__(self, links, rank=0):
        self._context, self._encoder = Context(), Encoder()
        self.requests = self._context.dealer(links.input_address, engine_identity(rank))
        self.outputs = self._context.push(links.output_address)
        self._marks = itertools.count()

    def greet(self, **fields):
        self.say(self.requests, ready_response(**fields))

    def put_out(self, *outputs, rank=0, incarnation=INCARNATION, **fields):
        self.say(self.outputs, EngineCoreOutputs(rank, incarnation, list(outputs), **fields))

    def say(self, link, *messages):
        self.send(link, *map(self._encoder.encode, messages))

    def send(self, link, *frames):
        assert link.try_send(list(frames)) is Sent.OK

    def mark(self):
        """An output in good order, sent behind everything else; returns its request id."""
        name = f"mark-{next(self._marks)}"
        self.put_out(EngineCoreOutput(name, 0, [1], FinishReason.LENGTH))
        return name

    def close(self):
        self.requests.close()
        self.outputs.close()
        self._context.close()


class FrontEnd:
    """A client of any kind: attached to links at whose other end somebody else sits, or with an
    engine of its own."""

    def __init__(self, kind, links=None, config=EngineConfig()):
        self.kind = kind
        self._runner = asyncio.Runner() if kind == "async" else None
        self.client = EngineCoreClient.make_client(
            kind != "inproc", kind == "async", config, links=links
        )

    def __getattr__(self, name):
        """Methods of the client, awaited where they must be."""
        if self._runner is None:
            return getattr(self.client, name)
        method = getattr(self.client, f"{name}_async", None)
        if method is None:
            return getattr(self.client, name)

        async def call(*arguments):
            return await asyncio.wait_for(method(*arguments), TIMEOUT_S)

        return lambda *arguments: self._runner.run(call(*arguments))

    def outputs_until(self, mark):
        """All outputs before ``mark``, which must come."""
        found = []
        while True:
            for output in self._get_output(TIMEOUT_S).outputs:
                if output.request_id == mark:
                    return found
                found.append(output)

    def hears(self, mark):
        """Whether a mark comes, soon: its link may be one that is just being made anew."""
        try:
            while True:
                for output in self._get_output(0.1).outputs:
                    if output.request_id == mark:
                        return True
        except TimeoutError:
            return False

    def _get_output(self, timeout_s):
        if self._runner is None:
            return self.client.get_output(timeout_s)
        return self._runner.run(asyncio.wait_for(self.client.get_output_async(), timeout_s))

    def reaches(self, link):
        """Whether a request comes out at the far end, soon."""
        try:
            self.add_request(EngineCoreRequest("hello", [1], SamplingParams(max_tokens=1, seed=0)))
        except EngineDeadError:
            return False
        return link.receive(0.1) is not None

    def close(self):
        self.shutdown()
        if self._runner is not None:
            self._runner.close()
