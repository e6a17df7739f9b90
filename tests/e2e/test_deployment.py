"""A whole deployment with a real (tiny) model: bad input, leaving clients, signals, orphans."""

import json
import os
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from trimaran.bench.server_process import ServerProcess
from trimaran.bench.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(180)
GOOD = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
IDLE = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}


def post(server, body, path="/v1/completions"):
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ("{nonsense", 400, None),
        ({"model": "absent"}, 404, "model"),
        ({"prompt": [5] * 5000}, 400, "prompt"),
        ({"prompt": [5] * 4000, "max_tokens": 1000}, 400, "max_tokens"),
        ('{"model":"tiny","prompt":[5],"temperature":NaN}', 400, "temperature"),
        ('{"model":"tiny","prompt":[5],"temperature":1e999}', 400, "temperature"),
        ({"prompt": [1 << 20]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"n": 1000}, 400, "n"),
        ({"stop_token_ids": [99999999]}, 400, "stop_token_ids"),
        ({"logit_bias": {"99999999": -100}}, 400, "logit_bias"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"prompt": "hello " * 1_500_000}, 400, "prompt"),
        ({"allowed_token_ids": [1], "min_tokens": 2}, 400, "allowed_token_ids"),
    ],
)
def test_bad_input_is_named_and_the_next_request_works(tiny, change, status, param):
    answer = post(tiny, change if isinstance(change, str) else {**GOOD, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert len(answer.content) < 8192
    assert post(tiny, GOOD).json()["usage"]["completion_tokens"] == 4


def test_a_long_text_may_be_cut_to_its_end(tiny):
    """Also where it would be refused whole: what is kept is what the last tokens say."""
    text = "hello world " * 20_000 + "the end"
    whole = post(tiny, {"model": "tiny", "prompt": text[-200:]}, "/tokenize").json()["tokens"]
    body = {**GOOD, "prompt": text, "truncate_prompt_tokens": 8, "return_token_ids": True}
    assert post(tiny, body).json()["choices"][0]["prompt_token_ids"] == whole[-8:]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 20])
def test_clients_that_leave_are_aborted(tiny, wait_for_metrics, stream, count):
    body = json.dumps({**GOOD, "max_tokens": 3500, "ignore_eos": True, "stream": stream}).encode()
    address = urlsplit(tiny.url)
    connections = []
    for _ in range(count):
        connection = socket.create_connection((address.hostname, address.port), timeout=30)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        connections.append(connection)
    wait_for_metrics(tiny.url, num_requests_running=count)
    for connection in connections:
        connection.close()
    wait_for_metrics(tiny.url, **IDLE)


def test_stream_and_whole_agree_for_chat_and_stop(tiny):
    for path, extra in (
        ("/v1/completions", {"prompt": "hello world"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ):
        body = {"model": "tiny", "max_tokens": 24, "temperature": 0.8, "seed": 3, **extra}
        whole = post(tiny, body, path).json()["choices"][0]
        text = whole.get("text") or whole["message"]["content"]
        stop = text[5:9]
        for final in (body, {**body, "stop": [stop]}):
            expected = post(tiny, final, path).json()["choices"][0]
            lines = post(tiny, {**final, "stream": True}, path).text.split("\n\n")
            assert lines[-2] == "data: [DONE]"
            choices = [json.loads(line[6:])["choices"][0] for line in lines[:-2]]
            joined = "".join(
                c.get("text") or c.get("delta", {}).get("content", "") for c in choices
            )
            assert joined == (expected.get("text") or expected["message"]["content"])
            finish = [c["finish_reason"] for c in choices if c["finish_reason"]]
            assert finish == [expected["finish_reason"]]
        assert joined == text[: text.index(stop)]


def test_only_the_engine_holds_torch(tiny):
    """Seen from outside, in the real processes: which of them have its libraries mapped."""
    children = Path(f"/proc/{tiny.pid}/task/{tiny.pid}/children").read_text().split()
    assert len(children) == 2
    with_torch = [
        Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        for pid in (str(tiny.pid), *children)
        if "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    ]
    assert len(with_torch) == 1
    assert "engine-0" in with_torch[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_in_order(tiny_model, number):
    with ServerProcess(tiny_model, "--distributed-executor-backend", "mock") as server:
        pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _in_tree(
            pid, server.pid
        )]  # fmt: skip
        assert len(pids) >= 2
        began = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - began < 5
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _in_tree(pid, root):
    while pid > 1 and pid != root:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False
    return pid == root


def test_damaged_weights_fail_requests_and_not_the_server(tmp_path):
    folder = write_tiny_model(tmp_path / "damaged")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    [size] = struct.unpack_from("<Q", data)
    begin, end = json.loads(data[8 : 8 + size])["model.norm.weight"]["data_offsets"]
    nan = b"\xc0\x7f" * ((end - begin) // 2)
    file.write_bytes(data[: 8 + size + begin] + nan + data[8 + size + end :])
    with ServerProcess(str(folder), "--served-model-name", "tiny") as server:
        for stream in (False, True):
            answer = post(server, {**GOOD, "stream": stream})
            assert "not numbers" in answer.text
            assert '"finish_reason":"' not in answer.text
        assert httpx.get(server.url + "/health", timeout=10).status_code == 200


def test_a_killed_engine_ends_the_deployment_with_its_cause(tiny_model, tmp_path):
    import subprocess
    import sys

    command = [sys.executable, "-m", "trimaran", "serve", tiny_model, "--port", "0"]
    command += ["--distributed-executor-backend", "mock"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if " ready at " in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        engine = next(
            pid for pid in children
            if b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )  # fmt: skip
        os.kill(int(engine), signal.SIGKILL)
        log = process.stderr.read().splitlines()
        assert process.wait(10) == 1
        assert "engine-0" in log[-1]
        assert "SIGKILL" in log[-1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_asleep_requests_wait_and_get_the_same_answer_after_waking_up(tiny, wait_for_metrics):
    before = post(tiny, {**GOOD, "return_token_ids": True}).json()["choices"][0]["token_ids"]
    for level in (0, 1, 2):
        assert httpx.post(f"{tiny.url}/sleep?level={level}", timeout=60).status_code == 200
        assert httpx.get(tiny.url + "/health").status_code == 200
        assert httpx.get(tiny.url + "/ready").json()["phase"] == "sleeping"
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(post, tiny, {**GOOD, "return_token_ids": True})
            wait_for_metrics(tiny.url, num_requests_running=0, num_requests_waiting=1)
            assert httpx.post(tiny.url + "/wake_up", timeout=60).status_code == 200
            assert held.result(60).json()["choices"][0]["token_ids"] == before
        assert httpx.get(tiny.url + "/ready").json()["phase"] == "ready"
    answer = httpx.post(tiny.url + "/start_profile")
    assert answer.status_code == 409
    assert "--profile-dir" in answer.json()["error"]["message"]
