"""Types of settings that are written as one text: sizes such as 512MiB, and lists separated by commas."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, SecretStr
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/,\s]+")
_ENDPOINT = re.compile(r"[!\"$->@-~]+")  # without a query or a fragment
_ROOT = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
_TRACES_PATH = "/v1/traces"
# Those of which an operator says whether they need a key.
_MAY_BE_OPEN = ("/docs", "/openapi.json", "/version", "/metrics")


def _split(value: Any) -> Any:
    """A text at its commas, without what is empty; anything else as it is."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _split_keys(value: Any) -> Any:
    if isinstance(value, str) and not _split(value):  # of a Secret without values: nobody means a server open to all
        raise ValueError("it is set, but there is no key in it; give at least one key, or unset it to need none")
    return _split(value)


def _are_printable(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    if any(not key.get_secret_value().isascii() or not key.get_secret_value().isprintable() for key in keys):
        raise ValueError("keys are printable ASCII")
    return keys


def _are_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is no origin; write scheme, host and port, such as https://ui.example:3000")
    return origins


def _are_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        try:
            if "%" in address:
                raise ValueError(f"{address!r} has an interface in it")
            ipaddress.ip_network(address)
        except ValueError as error:
            raise ValueError(f"{error}; write addresses or networks, such as 10.0.0.7,10.1.0.0/16") from error
    return addresses


def _may_be_open(paths: tuple[str, ...]) -> tuple[str, ...]:
    if paths == ("none",):
        return ()
    for path in paths:
        if path not in _MAY_BE_OPEN:
            raise ValueError(f"{path!r} is none of {', '.join(_MAY_BE_OPEN)}; all others are as they are")
    return paths


def _is_root(path: str) -> str:
    path = path.rstrip("/")
    if path and (not _ROOT.fullmatch(path) or path.split("/")[1] == "v1"):  # the routes' own beginning
        raise ValueError(f"{path!r} is no path to serve below; write one such as /lora or /team/lora")
    return path


def _is_endpoint(url: str) -> str:
    """The full address of an OTLP collector's traces."""
    if "@" in url:
        raise ValueError("it has a user or password in it; send that by OTEL_EXPORTER_OTLP_HEADERS")
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or not _ENDPOINT.fullmatch(url):
        raise ValueError(f"{url!r} is no address of a collector; write one such as http://127.0.0.1:4318")
    return url.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH


def _are_two(tokens: tuple[str, ...]) -> tuple[str, ...]:
    if len(tokens) not in (0, 2):
        raise ValueError("write two tokens separated by a comma, the one that says no first: no,yes")
    return tokens


Size = Annotated[ByteSize, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Endpoint = Annotated[str, AfterValidator(_is_endpoint)]
RootPath = Annotated[str, AfterValidator(_is_root)]
Keys = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_keys), AfterValidator(_are_printable)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_are_origins)]
Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_are_addresses)]
TokenPair = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_are_two)]
OpenPaths = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_may_be_open)]


class KeyVariables(EnvSettingsSource):
    """The variables of API keys, the empty ones too: those must not pass for unset."""

    def __init__(self, settings: type[BaseSettings]) -> None:
        super().__init__(settings, env_ignore_empty=False)

    def __call__(self) -> dict[str, Any]:
        """The values by the fields' names."""
        return {name: value for name, value in super().__call__().items() if name.endswith("api_keys")}


def sentence_of(fault: Any) -> str:
    """A wrong setting's fault, as pydantic has it, by the setting's flag and variable."""
    message = str(fault["msg"]).removeprefix("Value error, ")
    if not fault["loc"]:
        return f"Settings: {message}."
    name = str(fault["loc"][0])
    flag = name.lower().removeprefix("multilora_").replace("_", "-")
    return f"Setting --{flag} (MULTILORA_{flag.replace('-', '_').upper()}): {message}."
