"""What the commands share: HTTP to a server, with its errors as sentences for the person at the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

# Reading waits for tokens, which may queue; connecting does not.
TIMEOUT = httpx.Timeout(connect=5.0, read=600.0, write=600.0, pool=5.0)


class ClientError(Exception):
    """The server refused, or is not there; one sentence."""


def connect(url: str, api_key: str | None) -> httpx.Client:
    """A client for the server at `url`. Use its requests inside `sentences`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT)


@contextmanager
def sentences(url: str) -> Iterator[None]:
    """Turn httpx's errors into ClientError."""
    try:
        yield
    except httpx.InvalidURL as error:
        raise ClientError(f"{url!r} is no URL: {error}.") from error
    except httpx.UnsupportedProtocol as error:
        raise ClientError(f"{url!r} must begin with http:// or https://.") from error
    except httpx.ConnectError as error:
        raise ClientError(
            f"There is no server at {url}; start one with multilora serve, or set MULTILORA_URL."
        ) from error
    except httpx.TimeoutException as error:
        raise ClientError(f"The server at {url} does not answer.") from error
    except httpx.TransportError as error:
        raise ClientError(f"The connection to {url} broke: {error or type(error).__name__}.") from error


def checked(response: httpx.Response) -> httpx.Response:
    """The response, read; ClientError with the server's own sentence if it is an error."""
    if not response.is_success:  # a redirect is none: no path that the commands use is moved
        response.read()
        raise ClientError(error_sentence(response.text, response.status_code))
    return response


def error_sentence(text: str, status: int) -> str:
    """The message of an error body, or the status if there is none."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"The server answered with status {status}."
    return str(message)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events. ClientError for an error event or a stream cut short."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ClientError(str(event["error"]["message"]))
        yield event
    raise ClientError("The answer broke off.")
