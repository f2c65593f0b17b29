"""Values that schemathesis cannot make up: files that are an adapter, names of models and responses that are there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import schemathesis
from schemathesis import GenerationMode

_ADAPTER = Path(os.environ["ADAPTER_DIR"])
_FILES = {
    Path(name).stem: (_ADAPTER / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")
}
_MODELS = ("base", "shout", "base:reverse")
# Thousands of long answers would take long.
_MAX_TOKENS = 3
# Of requests that are answered with tokens, what says how many.
_LENGTHS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/chat/completions/batch": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}

# The first request of each, whatever was made up: all that are made up could be refused, for what a schema cannot tell.
_FIRST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "shout", "prompt": "x", "ignore_eos": True},
    "/v1/chat/completions": {"model": "shout", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True},
    "/v1/responses": {"model": "shout", "input": "x"},
    "/v1/messages": {"model": "shout", "messages": [{"role": "user", "content": "x"}]},
}

# The last stored response: nobody makes up an id.
_stored: list[str] = []


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:  # noqa: ARG001
    """Remember what was stored."""
    if case.path == "/v1/responses" and response.status_code == 200 and b'"store":true' in response.content:
        _stored[:] = re.findall(r"resp_[0-9a-f]{32}", response.text)[:1]


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:  # noqa: ARG001
    """Uploads that fit the schema hold an adapter; requests that fit it name a model that is there, and are short."""
    body = case.body
    if case.meta is None or case.meta.generation.mode != GenerationMode.POSITIVE:
        return
    if _stored and case.path.startswith("/v1/responses/{"):
        case.path_parameters["response_id"] = _stored[0]
    if not isinstance(body, dict):
        return
    if (case.method.upper(), case.path) == ("POST", "/v1/adapters"):
        # Beside the case: bytes in its body are no strings, and would make it one that does not fit the schema.
        kwargs |= {"data": {"name": body["name"]}, "files": _FILES}
    elif (case.method.upper(), case.path) == ("PUT", "/v1/adapters/{name}"):
        kwargs |= {"data": {}, "files": _FILES}
    elif "lora_path" in body and "lora_name" in body:
        body["lora_path"] = _ADAPTER.name
    elif case.path == "/v1/completions/batch":
        for item in body["items"]:
            if isinstance(item, dict):
                _make_servable(item, "max_tokens")
    else:
        length = _LENGTHS.get(case.path)
        if case.path in _FIRST:
            body.clear()
            body |= _FIRST.pop(case.path) | {str(length): _MAX_TOKENS}
            return
        if case.path == "/inference/v1/generate" and isinstance(body.get("sampling_params"), dict):
            _make_servable(body["sampling_params"], "max_tokens")
        elif case.path == "/invocations" and ("messages" in body or "prompt" in body):
            _make_servable(body, "max_tokens")
        _make_servable(body, length)
        if length is not None:
            body["stream"] = len(str(body)) % 2 == 1  # else hardly any of them would


def _make_servable(body: dict[str, Any], length: str | None) -> None:
    if "model" in body or "adapter_id" in body:
        body.pop("adapter_id", None)
        body["model"] = _MODELS[len(body) % len(_MODELS)]
    if _stored and body.get("previous_response_id"):
        body["previous_response_id"] = _stored[0]
    for name in ("reasoning_effort", "enable_thinking"):  # the bundled template takes neither
        body.pop(name, None)
    if length is not None:
        body.pop("max_completion_tokens", None)
        body[length] = _MAX_TOKENS if body.get(length) is None else min(body[length], _MAX_TOKENS)
