"""HTTP for the commands, with errors as sentences for the person at the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

if TYPE_CHECKING:
    import httpx  # where it is used: it takes half the time of a small upload to import

# Reading waits for tokens, which may queue; connecting does not. Arguments of httpx.Timeout.
TIMEOUT_SECONDS = {"connect": 5.0, "read": 600.0, "write": 600.0, "pool": 5.0}

Result = TypeVar("Result")


class ClientError(Exception):
    """The server refused, or is not there; one sentence."""


class Missing(ClientError):
    """There is nothing of that name at the server."""


class Response(Protocol):
    """An answer as `httpx.Response` has it."""

    @property
    def url(self) -> object: ...
    @property
    def status_code(self) -> int: ...
    @property
    def is_success(self) -> bool: ...
    @property
    def content(self) -> bytes: ...
    @property
    def text(self) -> str: ...
    def read(self) -> bytes: ...


Answered = TypeVar("Answered", bound=Response)


def server_url(given: str) -> str:
    """The server's own URL, where `given` may be that of its OpenAI API: with /v1, and with slashes at the end."""
    scheme, separator, rest = given.rpartition("://")
    return f"{scheme}{separator}{rest.rstrip('/').removesuffix('/v1').rstrip('/')}"


def connect(url: str, api_key: str | None) -> httpx.Client:
    """A client for the server at `url`, of `server_url`. Use its requests inside `sentences`."""
    import httpx

    try:
        httpx.URL(url).host.encode("idna")
    except UnicodeError as error:  # of a host such as a..b, which httpx passes and the resolver does not
        raise httpx.InvalidURL(str(error)) from error
    return httpx.Client(base_url=url, headers=headers_of(api_key), timeout=httpx.Timeout(**TIMEOUT_SECONDS))


def headers_of(api_key: str | None) -> dict[str, str]:
    """The headers that send the key. ClientError, without the key, for one that no header can hold."""
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable():
        raise ClientError("The API key is not printable ASCII, as every key is; correct --api-key (MULTILORA_API_KEY).")
    return {"Authorization": f"Bearer {api_key}"}


@contextmanager
def utf8(what: str) -> Iterator[None]:
    """Turn bytes that are not UTF-8 into ClientError; `what` is the sentence's subject. Python reads such bytes of the
    command line as lone surrogates, which no request can hold."""
    try:
        yield
    except UnicodeError as error:
        raise ClientError(
            f"The {what} is not UTF-8; give it in UTF-8, as a terminal with a UTF-8 locale does."
        ) from error


def no_server(url: str) -> ClientError:
    return ClientError(f"There is no server at {url}; start one with multilora serve, or set MULTILORA_URL.")


@contextmanager
def sentences(url: str) -> Iterator[None]:
    """Turn httpx's errors into ClientError."""
    import httpx

    try:
        yield
    except httpx.InvalidURL as error:
        raise ClientError(f"{url!r} is no URL: {error}.") from error
    except httpx.UnsupportedProtocol as error:
        raise ClientError(f"{url!r} must begin with http:// or https://.") from error
    except httpx.ConnectError as error:
        raise no_server(url) from error
    except httpx.TimeoutException as error:
        raise ClientError(f"The server at {url} does not answer.") from error
    except httpx.RequestError as error:
        raise ClientError(f"The connection to {url} broke: {error or type(error).__name__}.") from error


def checked(response: Answered) -> Answered:
    """The response, read; ClientError with the server's own sentence if it is an error."""
    if not response.is_success:  # a redirect is none: no path that the commands use is moved
        response.read()
        kind = Missing if response.status_code == 404 else ClientError
        raise kind(error_sentence(response.text, response.status_code))
    return response


def error_sentence(text: str, status: int) -> str:
    """The message of an error body, or the status if there is none."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"The server answered with status {status}."
    return str(message)


def path_of(collection: str, name: str) -> str:
    """The path of what has this name. Missing for what would be another path: nothing, or dots alone."""
    if not name.strip("."):
        raise Missing(f"{name!r} is no adapter's name; multilora ls lists the adapters.")
    return f"{collection}/{quote(name, safe='')}"


def answer_of(response: Response, read: Callable[[Any], Result]) -> Result:
    """The result of `read` on an answer's JSON. ClientError for an error, and for the answer of another kind of
    server."""
    return _found(checked(response), response.content, read)


def pages(client: httpx.Client, path: str, read: Callable[[Any], Result], **query: str | int) -> list[Result]:
    """The results of `read` on each entry of a listing, over all its pages."""
    found: list[Result] = []
    while True:
        response = client.get(path, params={"limit": 1000, **query})
        found += answer_of(response, lambda body: [read(one) for one in body["data"]])
        if not answer_of(response, lambda body: body.get("has_more", False)):
            return found
        query["after"] = answer_of(response, lambda body: str(body["last_id"]))


def event_of(response: httpx.Response, line: str, read: Callable[[Any], Result]) -> Result:
    """The result of `read` on a line of server-sent events. ClientError for an error event, and for another kind of
    server."""

    def read_event(event: Any) -> Result:
        if "error" in event:
            raise ClientError(str(event["error"]["message"]))
        return read(event)

    return _found(response, line.removeprefix("data:"), read_event)


def events(response: httpx.Response, read: Callable[[Any], Result]) -> Iterator[Result]:
    """`event_of` for each event of a stream. ClientError also for a stream cut short."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        raise _not_ours(response)
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        if line.removeprefix("data:").strip() == "[DONE]":
            return
        yield event_of(response, line, read)
    raise ClientError("The answer broke off.")


def _found(response: Response, text: str | bytes, read: Callable[[Any], Result]) -> Result:
    try:
        return read(json.loads(text))
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise _not_ours(response) from error


def _not_ours(response: Response) -> ClientError:
    return ClientError(f"The server at {response.url} is not multilora; set --url (MULTILORA_URL) to one that is.")
