"""A closed-loop streaming client for any OpenAI-compatible server (needs aiohttp: the dev extra).

Owns: the load and what is counted. A request counts as whole only with the exact number of tokens
and [DONE]; anything else is an error. Prompts are random token ids, new ones in every run.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

REQUEST_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Load:
    """What to send. Lengths in tokens."""

    concurrency: int
    num_requests: int
    input_tokens: int
    output_tokens: int
    vocab_size: int
    shared_tokens: int = 0  # common first tokens of all prompts


@dataclass
class LoadResult:
    """What came back. Times in seconds."""

    load: Load
    duration_s: float = 0.0
    output_tokens: int = 0
    errors: int = 0
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    first_error: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def run_load(url: str, model: str, load: Load) -> LoadResult:
    """Send ``load`` to ``url`` after a short warm-up and wait for every answer."""
    return asyncio.run(_run(url, model, load))


async def _run(url: str, model: str, load: Load) -> LoadResult:
    import aiohttp

    source = random.Random()
    shared = [source.randrange(10, load.vocab_size) for _ in range(load.shared_tokens)]

    def prompt() -> list[int]:
        own = load.input_tokens - load.shared_tokens
        return shared + [source.randrange(10, load.vocab_size) for _ in range(own)]

    result = LoadResult(load)
    timeout = aiohttp.ClientTimeout(total=REQUEST_DEADLINE_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        warm = LoadResult(load)
        await asyncio.gather(
            *(_one(session, url, model, prompt(), warm) for _ in range(min(4, load.concurrency)))
        )
        waiting = iter([prompt() for _ in range(load.num_requests)])

        async def worker() -> None:
            for one in waiting:
                await _one(session, url, model, one, result)

        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(load.concurrency)))
        result.duration_s = time.perf_counter() - start
    return result


async def _one(session: Any, url: str, model: str, prompt: list[int], result: LoadResult) -> None:
    wanted = result.load.output_tokens
    body = {
        "model": model, "prompt": prompt, "max_tokens": wanted, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start = time.perf_counter()
    last, got, done = 0.0, 0, False
    try:
        async with session.post(url + "/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                now, item = time.perf_counter(), json.loads(line[6:])
                if item.get("choices"):
                    times = result.inter_token_s if last else result.ttft_s
                    times.append(now - (last or start))
                    last = now
                if item.get("usage"):
                    got = item["usage"]["completion_tokens"]
        if got != wanted or not done:
            raise ValueError(f"{got} of {wanted} tokens, done={done}")
    except Exception as error:  # noqa: BLE001 - whatever went wrong counts as one failed request
        result.errors += 1
        result.first_error = result.first_error or f"{type(error).__name__}: {error}"
    result.output_tokens += got
