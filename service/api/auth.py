"""API keys: two scopes, checked before a body is read, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

from fastapi import Request
from pydantic import SecretStr
from starlette.datastructures import Headers

from service.api.errors import Forbidden, Unauthorized
from service.api.page import PAGE_PATHS

Scope = Literal["open", "inference", "admin"]

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/openapi.json", "/docs"})
_ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


def required_scope(method: str, path: str) -> Scope:
    """What a request needs. What is not listed as open needs a key, unknown paths too."""
    if path in OPEN_PATHS or (path in PAGE_PATHS and method in _READING):
        return "open"
    changes_adapters = path.rstrip("/") == "/v1/adapters" or path.startswith("/v1/adapters/")
    if path in _ADMIN_PATHS or (changes_adapters and method not in _READING):
        return "admin"
    return "inference"


class KeyRing:
    """The configured keys, held as digests. Without any key everything is allowed.

    An admin key is good for inference too; an inference key is not good for changing adapters.
    """

    def __init__(self, inference: tuple[SecretStr, ...], admin: tuple[SecretStr, ...]) -> None:
        self._inference = tuple(_digest(key.get_secret_value()) for key in inference)
        self._admin = tuple(_digest(key.get_secret_value()) for key in admin)

    @property
    def enabled(self) -> bool:
        """Whether any key is configured."""
        return bool(self._inference or self._admin)

    def check(self, scope: Scope, headers: Headers) -> str:
        """Who calls: which key of the settings, "" where none is needed. Unauthorized without a known key, Forbidden if
        the key's scope is too small."""
        if scope == "open" or not self.enabled:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized(
                "Send your API key in the header 'Authorization: Bearer <key>'.",
                headers={"WWW-Authenticate": "Bearer"},
            )
        digest = _digest(key.strip())
        admin, inference = _place(digest, self._admin), _place(digest, self._inference)
        if not (admin or inference):
            raise Unauthorized("This API key is not known here; check it.", headers={"WWW-Authenticate": "Bearer"})
        if scope == "admin" and not admin:
            raise Forbidden("This API key may not change adapters; use one with the admin scope.")
        return f"admin key {admin}" if admin else f"key {inference}"


def caller_of(request: Request) -> str:
    """Who calls, as the history of adapters names them; "" where no key is needed."""
    return str(request.scope.get("multilora.caller", ""))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _place(digest: bytes, known: tuple[bytes, ...]) -> int:
    """Which of the keys it is, from 1; 0 for none. Compares with every key, so that the time tells nothing about it."""
    matches = [hmac.compare_digest(digest, other) for other in known]
    return matches.index(True) + 1 if any(matches) else 0
