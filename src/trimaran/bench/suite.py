"""`trimaran bench`: every figure of docs/benchmarks.md in one run, as tables.

Owns: which parts there are and what they print. Ours and the peers named with --peer are loaded in
turn within each row, so that a machine that drifts drifts for both; the ratio is what to quote.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trimaran.bench.load_client import Load, LoadResult, percentile, run_load
from trimaran.bench.server_process import ServerProcess
from trimaran.bench.tiny_model import VOCAB_SIZE, write_tiny_model
from trimaran.errors import ConfigError

DEMO_VOCAB = 262_144
GIB = 1 << 30
Results = dict[str, list[dict[str, Any]]]


class _Suite:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.console = Console(width=max(110, Console().width))
        self.serve_args = shlex.split(arguments.serve_args)
        self.peers = dict(_parse_peer(text) for text in arguments.peer)
        self.results: Results = {}

    def show(self, part: str, title: str, rows: list[dict[str, Any]]) -> None:
        self.results[part] = rows
        table = Table(title=title, title_justify="left")
        for name in rows[0]:
            table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
        for row in rows:
            table.add_row(*(_shown(value) for value in row.values()))
        self.console.print(table)

    def startup(self) -> None:
        rows = [
            {"what": "trimaran --help", **_seconds(_time_help, 5)},
            {"what": "trimaran serve demo, to ready (warm)", **_seconds(self._time_serve, 4)},
        ]
        self.show("startup", "start-up (s)", rows)

    def _time_serve(self) -> float:
        with ServerProcess("demo", *self.serve_args) as server:
            return server.ready_s

    def memory(self) -> None:
        with ServerProcess("demo", *self.serve_args) as server:
            run_load(server.url, "demo", Load(8, 16, 128, 16, DEMO_VOCAB))
            sizes = server.pss_bytes()
        rows = [{"what": "process tree", "PSS GiB": sum(sizes.values()) / GIB}]
        rows += [{"what": name, "PSS GiB": size / GIB} for name, size in sizes.items()]
        self.show("memory", "memory after 16 requests, touched KV included", rows)

    def client_path(self) -> None:
        from trimaran.bench.client_path import message_rows, round_trip_rows, throughput_rows

        title = "client path, mock steps of 0 ms, 64 in 128 out"
        self.show("client-path-throughput", title, throughput_rows())
        self.show("client-path-round-trip", "client path, round trip", round_trip_rows())
        self.show("client-path-messages", "client path, cost of a message", message_rows())

    def offline(self) -> None:
        from trimaran import LLM, SamplingParams

        rows = []
        with LLM("demo") as llm:
            for batch in (1, 4, 16, 32):
                rows.append(_offline_row(llm, batch, SamplingParams))
        self.show("offline", "offline, 128 in 64 out (tok/s)", rows)

    def serve_demo(self) -> None:
        loads = [Load(c, n, 128, 64, DEMO_VOCAB) for c, n in ((1, 8), (8, 48), (32, 128))]
        self._serve("serve-demo", "demo", "served Gemma 3 270M, 128 in 64 out", loads)

    def serve_tiny(self) -> None:
        loads = [
            Load(c, n, 64, 128, VOCAB_SIZE) for c, n in ((1, 20), (16, 160), (64, 512), (256, 1024))
        ]
        with tempfile.TemporaryDirectory() as folder:
            model = write_tiny_model(Path(folder) / "tiny")
            self._serve("serve-tiny", str(model), "served tiny Llama, 64 in 128 out", loads)

    def _serve(self, part: str, model: str, title: str, loads: list[Load]) -> None:
        rows = []
        with ServerProcess(model, *self.serve_args) as server:
            for load in loads:
                ours = run_load(server.url, _model_of(server.url), load)
                rows.append(_load_row("trimaran", ours, None))
                for name, url in self.peers.items():
                    theirs = run_load(url, _model_of(url), load)
                    rows.append(_load_row(name, theirs, ours))
        self.show(part, title, rows)


def run_suite(arguments: argparse.Namespace) -> int:
    """Run the parts asked for; 1 if any request failed."""
    try:
        import aiohttp  # noqa: F401 - told now rather than after minutes of other parts
    except ImportError as error:
        raise ConfigError("bench needs aiohttp: pip install 'trimaran[dev]'") from error
    suite = _Suite(arguments)
    parts: dict[str, Callable[[], None]] = {
        "startup": suite.startup,
        "memory": suite.memory,
        "client-path": suite.client_path,
        "offline": suite.offline,
        "serve-demo": suite.serve_demo,
        "serve-tiny": suite.serve_tiny,
    }
    for name in arguments.only or parts:
        suite.console.print(f"[dim]running {name} …[/dim]")
        parts[name]()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(suite.results, indent=1))
    rows = [row for part in suite.results.values() for row in part]
    return 1 if any(row.get("errors") for row in rows) else 0


def _parse_peer(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not url.startswith("http"):
        raise ConfigError(f"--peer {text}: give NAME=URL, for example vllm=http://127.0.0.1:9001")
    return name, url.rstrip("/")


def _model_of(url: str) -> str:
    import urllib.request

    with urllib.request.urlopen(url + "/v1/models", timeout=30) as response:
        return str(json.load(response)["data"][0]["id"])


def _time_help() -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "trimaran", "--help"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return time.perf_counter() - start


def _seconds(measure: Callable[[], float], runs: int) -> dict[str, float]:
    values = [measure() for _ in range(runs)]
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _offline_row(llm: Any, batch: int, params_type: Any) -> dict[str, Any]:
    import random

    def run(max_tokens: int) -> float:
        prompts = [[random.randrange(10, DEMO_VOCAB) for _ in range(128)] for _ in range(batch)]
        params = params_type(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_progress=False)
        return time.perf_counter() - start

    run(2)
    prefill_s, whole_s = run(1), run(65)
    return {
        "batch": batch,
        "prefill tok/s": batch * 128 / prefill_s,
        "decode tok/s": batch * 64 / (whole_s - prefill_s),
    }


def _load_row(server: str, result: LoadResult, ours: LoadResult | None) -> dict[str, Any]:
    if result.errors:
        Console(stderr=True).print(f"{server}: {result.first_error}", style="red")
    return {
        "server": server,
        "concurrency": result.load.concurrency,
        "tok/s": result.tokens_per_s,
        "TTFT p50 ms": percentile(result.ttft_s, 0.5) * 1e3,
        "TTFT p99 ms": percentile(result.ttft_s, 0.99) * 1e3,
        "ITL p50 ms": percentile(result.inter_token_s, 0.5) * 1e3,
        "ITL p99 ms": percentile(result.inter_token_s, 0.99) * 1e3,
        "errors": result.errors,
        "ours/theirs": ours.tokens_per_s / result.tokens_per_s if ours else "",
    }


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
