"""Keys on every route, CORS, and what is answered while nothing can be served."""

import pytest
from starlette.routing import Route
from tests.unit.server.fake_llm import FakeLLM
from tests.unit.server.harness import serving

from trimaran.config import resolve
from trimaran.errors import ConfigError, EngineDeadError
from trimaran.messages import DeploymentState
from trimaran.server.auth import Access, KeyRing, load_keys

COMPLETION = {"prompt": "a", "max_tokens": 1}
OPEN = {"/health", "/ready"}
ADMIN = {
    "/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping", "/start_profile", "/stop_profile",
    "/requests", "/requests/nobody",
}  # fmt: skip


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def live_routes(server):
    routes = [
        (route.path.replace("{model:path}", "demo").replace("{request_id:path}", "nobody"), method)
        for route in server.app.router.routes
        if isinstance(route, Route)
        for method in route.methods
    ]
    assert len(routes) == len(server.app.router.routes), "a route of another kind: test it too"
    assert len(routes) >= 21
    return routes


def test_every_live_route_needs_a_key():
    """T-O1, over what is really mounted and over what is not."""
    with serving(api_key="key-1,key-2", admin_api_key="boss") as server:
        for path, method in live_routes(server):
            for headers in (
                {},
                bearer("wrong"),
                {"authorization": "Bearer"},
                {"authorization": "key-1"},
                {"authorization": "Basic key-1"},
                {"x-api-key": "key-1"},
            ):
                status = server.client.request(method, path, headers=headers).status_code
                assert (status == 401) == (path not in OPEN), (method, path, headers, status)
            for key in ("key-1", "key-2", "boss"):
                status = server.client.request(method, path, headers=bearer(key)).status_code
                refused = path in ADMIN and key != "boss"
                assert (status == 401) == refused, (method, path, key, status)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nope"), ("POST", "/v1//completions"), ("POST", "/V1/completions"),
        ("POST", "/v1/completions/"), ("GET", "/health/"), ("GET", "//health"), ("POST", "/health"),
        ("GET", "/docs"), ("POST", "/invocations"), ("GET", "/load"), ("POST", "/scale_elastic_ep"),
        ("OPTIONS", "/v1/completions"), ("OPTIONS", "/health"), ("HEAD", "/metrics"),
        ("GET", "/%68ealth/../metrics"), ("DELETE", "/v1/models"),
    ],
)  # fmt: skip
def test_what_is_not_mounted_needs_a_key_too(keyed, method, path):
    response = keyed.client.request(method, path)
    assert response.status_code == 401
    if method != "HEAD":
        assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.fixture(scope="module")
def keyed():
    with serving(api_key="key-1") as server:
        yield server


def test_a_key_opens_and_its_lack_does_no_work(keyed):
    body = {**COMPLETION, "stream": True}
    assert keyed.post("/v1/completions", body).status_code == 401
    assert keyed.llm.requests == []
    assert keyed.post("/v1/completions", body, headers=bearer("key-1")).status_code == 200
    # no admin key is set, so an API key will do
    assert keyed.post("/reset_prefix_cache", {}, headers=bearer("key-1")).json() == {"reset": True}
    assert keyed.post("/reset_prefix_cache", {}).status_code == 401


def test_an_admin_key_alone_guards_admin_routes_only():
    with serving(admin_api_key="boss") as server:
        assert server.post("/v1/completions", COMPLETION).status_code == 200
        assert server.post("/reset_prefix_cache", {}).status_code == 401
        assert server.post("/reset_prefix_cache", {}, headers=bearer("boss")).status_code == 200


def test_without_keys_all_is_open():
    with serving() as server:
        assert server.post("/reset_prefix_cache", {}).json() == {"reset": True}
        server.llm.resets = [True, False]
        assert server.post("/reset_prefix_cache", {}).json() == {"reset": False}
        assert server.client.get("/metrics").status_code == 200
        assert server.client.get("/version").json()["version"]


def test_keys_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("a\n\n b \n")
    keys = load_keys(resolve({"api_key_file": str(file), "api_key": "c"}, environment={}).server)
    for key, allowed in ((b"a", True), (b"b", True), (b"c", True), (b"", False), (b"d", False)):
        assert keys.allows(key, Access.KEY) is allowed
    for content in ("", "\n \n"):
        file.write_text(content)
        with pytest.raises(ConfigError, match="holds no key"):
            load_keys(resolve({"api_key_file": str(file)}, environment={}).server)
    with pytest.raises(ConfigError, match="--api-key-file"):
        load_keys(resolve({"api_key_file": str(tmp_path / "none")}, environment={}).server)
    with pytest.raises(ConfigError, match="empty"):
        load_keys(resolve({"admin_api_key": ""}, environment={}).server)


def test_non_ascii_keys():
    ring = KeyRing(("schlüssel",))
    assert ring.allows("schlüssel".encode(), Access.KEY)
    assert not ring.allows(None, Access.KEY)


ORIGIN = {"origin": "https://app.example"}


def test_cors():
    """T-O6"""
    flags = {"api_key": "key-1", "allowed_origins": "https://app.example"}
    with serving(**flags) as server:
        preflight = {
            **ORIGIN,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        }
        path = "/v1/chat/completions"
        response = server.client.options(path, headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN["origin"]
        assert "authorization" in response.headers["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in response.headers
        assert server.client.options(path, headers=ORIGIN).status_code == 401
        message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        key = {**ORIGIN, **bearer("key-1")}
        server.llm.fail_after = None
        for body, headers, status in (
            (message, key, 200),
            ({**message, "stream": True}, key, 200),
            (message, ORIGIN, 401),
            ({}, key, 400),
        ):
            response = server.post(path, body, headers=headers)
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == ORIGIN["origin"]
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        other = server.client.get("/health", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = {**preflight, "origin": "https://evil.example"}
        answer = server.client.options(path, headers=refused)
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers
        assert "origin" in answer.json()["error"]["message"]


def test_cors_on_internal_errors(monkeypatch):
    with serving(allowed_origins="*") as server:

        def broken(*_args, **_options):
            raise RuntimeError("/secret/path")

        monkeypatch.setattr(server.llm, "encode", broken)
        response = server.post("/v1/completions", COMPLETION, headers=ORIGIN)
        assert response.status_code == 500
        assert response.headers["access-control-allow-origin"] == "*"
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in response.json()["error"]["message"]
        monkeypatch.undo()
        server.still_works()


def test_no_cors_by_default():
    with serving() as server:
        preflight = {**ORIGIN, "access-control-request-method": "POST"}
        response = server.client.options("/v1/completions", headers=preflight)
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers


def test_starting_up():
    """/ready answers from the first second; requests get 503, the phase and Retry-After."""
    llm = FakeLLM()
    llm.is_ready = False
    with serving(llm, api_key="key-1") as server:
        server.state.llm = None
        server.deployment[0] = DeploymentState(ready=False, phase="loading", percent=41.26)
        response = server.client.get("/ready")
        assert response.status_code == 503
        assert response.json() == {"ready": False, "phase": "loading", "percent": 41.3}
        assert response.headers["retry-after"]
        assert server.client.get("/health").status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = server.post(path, COMPLETION, headers=bearer("key-1"))
            assert response.status_code == 503
            assert "loading" in response.json()["error"]["message"]
            assert "41 %" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) >= 1
        models = server.client.get("/v1/models", headers=bearer("key-1")).json()
        assert models["data"][0]["max_model_len"] is None
        # the engines are ready, this server is not connected yet
        server.deployment[0] = DeploymentState(ready=True, phase="ready", percent=100)
        server.state.llm = llm
        assert server.client.get("/ready").json()["phase"] == "connecting"
        llm.is_ready = True
        assert server.client.get("/ready").json() == {
            "ready": True,
            "phase": "ready",
            "percent": 100.0,
        }
        assert server.client.head("/ready").status_code == 200
        response = server.post("/v1/completions", COMPLETION, headers=bearer("key-1"))
        assert response.status_code == 200


@pytest.mark.parametrize("how", ["engine", "deployment"])
def test_given_up(how):
    with serving() as server:
        if how == "engine":
            server.llm.dead_error = EngineDeadError("gone", cause="/secret")
        else:
            server.deployment[0] = DeploymentState(
                ready=False, phase="failed", percent=0, failure="/secret"
            )
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ready").status_code == 503
        response = server.post("/v1/completions", COMPLETION)
        assert response.status_code == 503
        assert "secret" not in response.text
