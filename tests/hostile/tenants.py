"""Two tenants of one application: the one has a private adapter, the other asks for it in every way there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from service.settings import BUNDLED_ADAPTERS_DIR
from service.tenants.keys_file import hash_of
from tests.hostile.application import Answer, application
from tests.support.http.uploads import MULTIPART, multipart, parts_of

_OWNER, _STRANGER = "key-of-the-owner", "key-of-the-stranger"
# As long as each other, so that answers differ in nothing else.
SECRET, ABSENT = "owner/quarry", "owner/absent"
PATHS = """/v1/adapters/NAME /v1/adapters/NAME/history /v1/adapters/NAME/rollback /v1/adapters/NAME/pin
/v1/adapters/NAME/content /v1/models/NAME /v1/models/NAME/ /v1/adapters/stranger/../NAME
/v1/adapters?after=NAME /v1/models?after=NAME /v1/adapters?name=NAME /v1/adapters?owner=owner /v1/adapters
/v1/models /metrics?adapter=NAME /v1/completions
/v1/chat/completions /v1/embeddings /tokenize /v1/load_lora_adapter /v1/unload_lora_adapter /v1/completions/batch
/classify /pooling /v1/score /v2/rerank"""
_KEY = '[[keys]]\ntenant = "{}"\nsha256 = "{}"\nscopes = ["infer", "upload", "delete"]\n'


class TwoTenants:
    """See the module's docstring; the application is below `root`."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        path = root / "keys.toml"
        keys = [("owner", _OWNER), ("stranger", _STRANGER)]
        path.write_text(
            "".join(f"[tenants.{tenant}]\n" for tenant, _ in keys)
            + "".join(_KEY.format(tenant, hash_of(key).hex()) for tenant, key in keys)
        )
        self.application = application(root / "app", keys_file=path)
        parts = parts_of(BUNDLED_ADAPTERS_DIR / "shout")
        body = multipart(
            [
                ('name="name"', b"quarry"),
                *((f'name="{name}"; filename="{file}"', data) for name, (file, data) in parts.items()),
            ]
        )
        answer = self._ask(_OWNER, "POST", "/v1/adapters", body, MULTIPART["Content-Type"])
        assert answer.status == 201, answer
        self._digest = json.loads(answer.body)["digest"].encode()

    def check(self, value: tuple[str, str, str, str, str]) -> None:
        """AssertionError where an answer about the adapter that there is differs from that about one that there is not,
        or tells of it unasked."""
        answers = [self._about(name, *value) for name in (SECRET, ABSENT)]
        told = [(answer.status, self._without_names(answer.body)) for answer in answers]
        assert told[0] == told[1], answers
        assert self._digest not in answers[0].body, answers[0]
        kept = self._ask(_OWNER, "GET", "/v1/adapters/quarry")
        assert kept.status == 200, f"it is gone: {kept}"

    def _about(self, name: str, method: str, path: str, body: str, written: str, spelling: str) -> Answer:
        short = {"whole": name, "short": name.partition("/")[2], "upper": name.upper(), "wide": "ｏ" + name[1:]}
        asked = short.get(spelling, name + spelling)
        quoted = asked.replace("/", "%2F") if written == "quoted" else asked
        data = body.replace("NAME", json.dumps(asked)[1:-1]).encode()
        return self._ask(_STRANGER, method, path.replace("NAME", quoted), data if method in ("POST", "PATCH") else b"")

    def _ask(self, key: str, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> Answer:
        headers = (
            (b"authorization", f"Bearer {key}".encode()),
            (b"content-type", kind.encode()),
            (b"content-length", str(len(body)).encode()),
        )
        return self.application.call(method, path, body, headers)

    @staticmethod
    def _without_names(body: bytes) -> bytes:
        for name in (b"quarry", b"absent", b"QUARRY", b"ABSENT"):
            body = body.replace(name, b"?")
        told: Any = json.loads(body) if body[:1] == b"{" else None
        if isinstance(told, dict):  # of an answer of the base
            for field in ("id", "created"):
                told.pop(field, None)
            return json.dumps(told).encode()
        return body


def questions() -> st.SearchStrategy[Any]:
    """(method, path, body, how the name is written in the path, how it is spelled)."""
    path = st.sampled_from(PATHS.split())
    body = st.sampled_from(
        [
            '{"model": "NAME", "prompt": "a", "max_tokens": 1}',
            '{"adapter_id": "NAME", "prompt": "a", "max_tokens": 1}',
            '{"model": "base:NAME", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}',
            '{"model": "NAME", "input": "a"}',
            '{"items": [{"model": "NAME", "prompt": "a", "max_tokens": 1}]}',
            '{"visibility": "public"}',
            '{"visibility": "shared", "shared_with": ["stranger"]}',
            '{"version": 1}',
            '{"lora_name": "NAME"}',
            '{"lora_name": "NAME", "lora_path": "/"}',
            "{}",
            "",
        ]
    )
    method = st.sampled_from(["GET", "POST", "DELETE", "PATCH", "PUT", "HEAD"])
    spelling = st.sampled_from(["whole", "short", "upper", "wide", "@1", "@", "@0", "/", " ", "\u200b", "%00", "a"])
    return st.tuples(method, path, body, st.sampled_from(["plain", "quoted"]), spelling)


def keys_files() -> st.SearchStrategy[str]:
    """Texts of keys files: lines that are right, and some that are not."""
    lines = [
        "[tenants.a]",
        "[tenants.A]",
        "[[keys]]",
        'tenant = "a"',
        f'sha256 = "{"0" * 64}"',
        'sha256 = "x"',
        'scopes = ["infer"]',
        "scopes = []",
        'scopes = "infer"',
        "weight = 0.0",
        "weight = nan",
        "weight = 2",
        "tokens_per_minute = -1",
        'adapter_bytes = "1GiB"',
        "created = 2026-01-01",
        "created = 2026-01-01T00:00:00Z",
        "requests_in_flight = 99999999999999999999",
        "[tenants]",
        "=",
        '"" = 1',
    ]
    return st.lists(st.sampled_from(lines) | st.text(max_size=9), max_size=10).map("\n".join)
