"""What the way through client, wire and engine process costs, with a model that costs nothing.

Owns: three measurements with the mock executor (steps of 0 ms), one engine process and a consumer
in this process, without HTTP: tokens per second, the parts of one message, the round trip of one
token. Called by ``suite``.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from trimaran.bench.load_client import percentile
from trimaran.bench.tiny_model import VOCAB_SIZE, write_tiny_model
from trimaran.client.async_llm import AsyncLLM
from trimaran.client.core_client import EngineCoreClient
from trimaran.config import EngineConfig, ExecutorConfig, ModelConfig
from trimaran.errors import DeadlineExceededError
from trimaran.ids import engine_identity
from trimaran.ipc.codec import Decoder, Encoder
from trimaran.ipc.folder import PrivateFolder
from trimaran.ipc.listeners import Listener
from trimaran.ipc.sockets import Context
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestType,
    SchedulerStats,
)
from trimaran.sampling_params import SamplingParams

T = TypeVar("T")
Row = dict[str, Any]

CONCURRENCIES = (1, 64, 256)
_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 128
_MIN_REQUESTS = 64
_ROUND_TRIPS = 3000
_WARM_UP_TRIPS = 300
_MESSAGES = 2000
_DEADLINE_S = 120.0
_RECEIVE_DEADLINE_S = 5.0


def throughput_rows() -> list[Row]:
    """Output tokens per second at each concurrency, as messages and as detokenised streams."""
    return _run(_throughput())


def round_trip_rows() -> list[Row]:
    """From ``add_request`` to the only token of a request, one request at a time."""
    return _run(_round_trips())


def message_rows() -> list[Row]:
    """Microseconds of each thing that is done to a message, each done many times in a row."""
    prompt = list(range(1, _PROMPT_TOKENS + 1))
    request = EngineCoreRequest("0123abcd-1", prompt, SamplingParams(max_tokens=16, seed=1))
    rows = [_message_row(f"request, {_PROMPT_TOKENS} prompt tokens", request)]
    for count in CONCURRENCIES:
        outputs = EngineCoreOutputs(
            rank=0,
            incarnation=1 << 60,
            outputs=[EngineCoreOutput(f"0123abcd-{i}", 7, [1234]) for i in range(count)],
            stats=SchedulerStats(step=1000, num_running=count, kv_cache_usage=0.25),
            timestamp=time.time(),
        )
        rows.append(_message_row(f"outputs of {count} requests", outputs))
    return rows


def _run(measurement: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(_DEADLINE_S):
            return await measurement

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(limited())


def _config(model: str = "demo") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model), executor=ExecutorConfig(distributed_executor_backend="mock")
    )


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)


async def _throughput() -> list[Row]:
    rows: list[Row] = []
    client = EngineCoreClient.make_client(True, True, _config())
    try:
        await client.wait_ready_async()
        for concurrency in CONCURRENCIES:
            await _tokens_per_s(client, concurrency)  # the first round meets cold caches
            tokens_per_s, per_message = await _tokens_per_s(client, concurrency)
            rows.append(
                {
                    "concurrency": concurrency,
                    "client tok/s": tokens_per_s,
                    "tokens a message": per_message,
                }
            )
    finally:
        await client.shutdown_async()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        async with await AsyncLLM.create(_config(str(model))) as llm:
            for row in rows:
                await _stream_tokens_per_s(llm, row["concurrency"])
                row["AsyncLLM tok/s"] = await _stream_tokens_per_s(llm, row["concurrency"])
    return rows


_request_numbers = itertools.count()


def _request(max_tokens: int) -> EngineCoreRequest:
    number = next(_request_numbers)
    prompt = [1 + (number + i) % 1000 for i in range(_PROMPT_TOKENS)]
    return EngineCoreRequest(f"bench-{number}", prompt, _params(max_tokens))


async def _tokens_per_s(client: EngineCoreClient, concurrency: int) -> tuple[float, float]:
    requests = [_request(_OUTPUT_TOKENS) for _ in range(max(_MIN_REQUESTS, 4 * concurrency))]
    waiting = iter(requests)
    num_unfinished, num_tokens, num_messages = len(requests), 0, 0
    start = time.perf_counter()
    for request in itertools.islice(waiting, concurrency):
        await client.add_request_async(request)
    while num_unfinished:
        message = await client.get_output_async()
        num_messages += bool(message.outputs)
        for output in message.outputs:
            num_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                num_unfinished -= 1
                if (request_or_none := next(waiting, None)) is not None:
                    await client.add_request_async(request_or_none)
    return num_tokens / (time.perf_counter() - start), num_tokens / num_messages


async def _stream_tokens_per_s(llm: AsyncLLM, concurrency: int) -> float:
    num_each = max(1, _MIN_REQUESTS // concurrency, 4)
    num_tokens = 0

    async def consume() -> None:
        nonlocal num_tokens
        for _ in range(num_each):
            number = next(_request_numbers)
            prompt = [4 + (number + i) % (VOCAB_SIZE - 4) for i in range(_PROMPT_TOKENS)]
            async for item in llm.generate(prompt, _params(_OUTPUT_TOKENS)):
                last = item
            num_tokens += last.num_generated_tokens

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(consume())
    return num_tokens / (time.perf_counter() - start)


async def _round_trips() -> list[Row]:
    client = EngineCoreClient.make_client(True, True, _config())
    times_s = []
    try:
        await client.wait_ready_async()
        for request in [_request(1) for _ in range(_WARM_UP_TRIPS + _ROUND_TRIPS)]:
            start = time.perf_counter()
            await client.add_request_async(request)
            while not (await client.get_output_async()).outputs:
                pass  # statistics of an idle engine
            times_s.append(time.perf_counter() - start)
    finally:
        await client.shutdown_async()
    measured = times_s[_WARM_UP_TRIPS:]
    return [
        {
            "what": "one token, concurrency 1",
            **{f"p{p:g} µs": percentile(measured, p / 100) * 1e6 for p in (50, 90, 99)},
        }
    ]


def _message_row(what: str, message: Any) -> Row:
    encoder, decoder = Encoder(), Decoder[Any](type(message))
    frame = encoder.encode(message)
    encode_us = _mean_us(lambda: encoder.encode(message))
    decode_us = _mean_us(lambda: decoder.decode(frame))
    send_us, receive_us = _link_us(frame)
    return {
        "message": what,
        "bytes": len(frame),
        "encode µs": encode_us,
        "send µs": send_us,
        "receive µs": receive_us,
        "decode µs": decode_us,
    }


def _mean_us(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(_MESSAGES):
        work()
    return (time.perf_counter() - start) / _MESSAGES * 1e6


def _link_us(frame: bytes) -> tuple[float, float]:
    """(send, receive) on a pair as between front end and engine, what the caller pays for each."""
    folder, context = PrivateFolder(), Context()
    listener = Listener.bind_ipc(folder.socket_path("bench"))
    router = context.router(listener.address, listener.fileno())
    dealer = context.dealer(listener.address, engine_identity(0))
    frames = [engine_identity(0), RequestType.ADD.value, frame]
    send_s = receive_s = 0.0
    try:
        dealer.try_send([b"here"])
        if router.receive(_RECEIVE_DEADLINE_S) is None:
            raise DeadlineExceededError("the two ends of a link did not connect")
        for _ in range(_MESSAGES):
            start = time.perf_counter()
            router.try_send(frames)
            sent = time.perf_counter()
            while not dealer.has_message:
                pass
            arrived = time.perf_counter()
            dealer.try_receive()
            receive_s += time.perf_counter() - arrived
            send_s += sent - start
    finally:
        for closing in (router, dealer, listener, context, folder):
            closing.close()
    return send_s / _MESSAGES * 1e6, receive_s / _MESSAGES * 1e6
