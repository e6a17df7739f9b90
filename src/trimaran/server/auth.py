"""Who may call which route.

Owns: the keys, and the rule: once a key is set every route needs one, except those that were
registered as open. Decided per route object, never by the spelling of a path: what matches no route
needs a key as well. CORS preflights are answered before this, by Starlette's middleware.
"""

import hmac
from enum import Enum
from pathlib import Path

from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from trimaran.config import ServerConfig
from trimaran.errors import AuthenticationError, ConfigError


class Access(Enum):
    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


class KeyRing:
    """API keys and the admin key, compared in constant time."""

    def __init__(self, api_keys: tuple[str, ...] = (), admin_key: str | None = None) -> None:
        self._api_keys = tuple(key.encode("utf-8") for key in api_keys)
        self._admin_keys = (admin_key.encode("utf-8"),) if admin_key is not None else ()

    @property
    def is_empty(self) -> bool:
        return not self._api_keys and not self._admin_keys

    def allows(self, token: bytes | None, access: Access) -> bool:
        """Whether ``token`` opens routes of this kind. The admin key opens all."""
        if access is Access.OPEN:
            return True
        keys = self._api_keys + self._admin_keys
        if access is Access.ADMIN and self._admin_keys:
            keys = self._admin_keys
        elif not self._api_keys:
            return True  # nothing guards the ordinary routes
        matches = [hmac.compare_digest(token or b"", key) for key in keys]
        return any(matches)


def load_keys(config: ServerConfig) -> KeyRing:
    """Keys from flags and the key file.

    Raises ConfigError: the file cannot be read or holds no key, or a key is empty.
    """
    keys = [secret.reveal() for secret in config.api_key]
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {config.api_key_file}: {error}") from error
        in_file = [line.strip() for line in lines if line.strip()]
        if not in_file:
            raise ConfigError(f"--api-key-file {config.api_key_file}: holds no key")
        keys += in_file
    admin = config.admin_api_key.reveal() if config.admin_api_key is not None else None
    if admin == "" or "" in keys:
        raise ConfigError("an API key may not be empty (--api-key, --admin-api-key)")
    return KeyRing(tuple(keys), admin)


class KeyGuard:
    """ASGI middleware. Routes not in ``levels`` (by identity) need a key."""

    def __init__(
        self, app: ASGIApp, *, keys: KeyRing, router: Router, levels: dict[int, Access]
    ) -> None:
        self._app = app
        self._keys = keys
        self._router = router
        self._levels = levels

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._keys.is_empty:
            route = scope["route"] = self._route(scope)  # also for the log, should it end here
            access = self._access(route)
            if not self._keys.allows(_bearer_token(scope), access):
                kind = "the admin key" if access is Access.ADMIN else "a valid API key"
                raise AuthenticationError(
                    f"this route needs {kind}: send 'Authorization: Bearer KEY'"
                )
        await self._app(scope, receive, send)

    def _route(self, scope: Scope) -> BaseRoute | None:
        for route in self._router.routes:
            if route.matches(scope)[0] is Match.FULL:
                return route
        return None

    def _access(self, route: BaseRoute | None) -> Access:
        return Access.KEY if route is None else self._levels.get(id(route), Access.KEY)


def _bearer_token(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = bytes(value).partition(b" ")
            return token.strip() if scheme.lower() == b"bearer" else None
    return None
