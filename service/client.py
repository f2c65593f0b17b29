"""A client for trainers: adapters from tensors, a PEFT model or a directory, pauses, and answers with their version.

    from service.client import Client

    with Client("http://127.0.0.1:8000") as client:
        version = client.upload("policy", peft_model)         # ephemeral: in the server's memory alone
        answer = client.generate("policy", prompt_ids, max_tokens=64, n=8, logprobs=0)
        assert answer.digest == version.digest

`AsyncClient` has the same methods, each to be awaited. torch, safetensors and peft are imported where they are given.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import httpx

from service.cli.adapter_files import CONFIG, TENSORS, adapter_files
from service.cli.client import TIMEOUT_SECONDS, answer_of, headers_of, path_of, sentences, server_url
from service.cli.upload_client import Multipart, put


class Version(NamedTuple):
    """The version that a name stands for."""

    name: str
    number: int
    digest: str


class Answer(NamedTuple):
    """An answer to `generate`.

    digest    of the adapter that answered; "" for the base
    choices   each with `token_ids`, `logprobs` and `finish_reason`, as vLLM writes them
    """

    digest: str
    choices: list[dict[str, Any]]

    def logprobs(self, index: int) -> list[float]:
        """The log probability of each token of a choice, where `logprobs` were asked for."""
        return [float(one["logprob"]) for one in self.choices[index]["logprobs"]["content"]]


class _Calls:
    """The methods of both clients. Each raises ClientError with the server's sentence."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url, self._api_key = server_url(url), api_key
        self._options: dict[str, Any] = {
            "base_url": self._url,
            "headers": headers_of(api_key),
            "timeout": httpx.Timeout(**{**TIMEOUT_SECONDS, "pool": None}),
            "limits": httpx.Limits(max_connections=None),
        }

    def _call(self, read: Callable[[httpx.Response], Any], method: str, path: str, **options: Any) -> Any:
        raise NotImplementedError

    def _run(self, work: Callable[[], Any]) -> Any:
        raise NotImplementedError

    def upload(
        self,
        name: str,
        adapter: Any,
        config: Any = None,
        *,
        ephemeral: bool = True,
        note: str = "",
        if_version: str = "",
        on_new_version: Literal["keep", "continue", "restart"] | None = None,
    ) -> Any:
        """Make the adapter the name's current version; returns it as `Version`.

        adapter     tensors by PEFT's names, a PEFT model, or the path of a directory that PEFT saved, or of an archive
        config      of tensors: a LoraConfig or a dict; of a PEFT model: the name of its adapter, "default" if None
        ephemeral   in the server's memory alone, until it ends
        if_version  number or digest that the name must stand for until then
        on_new_version  of requests that do not say, from now on; None: as it is
        """
        given = {"ephemeral": "true" if ephemeral else None, "on_new_version": on_new_version}
        query = "&".join(f"{one}={value}" for one, value in given.items() if value is not None)
        headers = {"If-Match": f'"{if_version}"'} if if_version else {}
        path = path_of("/v1/adapters", name) + f"?{query}" * bool(query)

        def send() -> Version:
            with _files_of(adapter, config) as files:
                body = Multipart({"note": note} if note else {}, files)
                return answer_of(put(self._url, self._api_key, path, body, headers), _version)

        return self._run(send)

    def move(self, name: str, version: int | str) -> Any:
        """Make an older version, by number or digest, the current one again; returns it as `Version`."""
        path = f"{path_of('/v1/adapters', name)}/rollback"
        return self._call(lambda answer: answer_of(answer, _version), "POST", path, json={"version": version})

    def delete(self, name: str) -> Any:
        """Delete the name with its versions."""
        return self._call(_nothing, "DELETE", path_of("/v1/adapters", name))

    def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> Any:
        """Stop all requests of the server between two steps; it ends by itself after --pause-limit-seconds."""
        return self._call(_nothing, "POST", f"/pause?mode={mode}")

    def resume(self) -> Any:
        """Let all requests go on."""
        return self._call(_nothing, "POST", "/resume")

    def generate(
        self,
        model: str,
        token_ids: Sequence[int],
        *,
        on_new_version: Literal["keep", "continue", "restart"] | None = None,
        **sampling: Any,
    ) -> Any:
        """An `Answer` of the base or an adapter; `sampling` as the fields of a completion, such as `max_tokens`,
        `temperature`, `n`, `seed`, and `logprobs`, which is a number. With `on_new_version`, choices have
        `adapter_versions`."""
        body = {"model": model, "token_ids": list(token_ids), "sampling_params": sampling}
        if on_new_version is not None:
            body["on_new_version"] = on_new_version
        return self._call(_answer, "POST", "/inference/v1/generate", json=body)


class Client(_Calls):
    """See the module. A context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key)
        self._http = httpx.Client(**self._options)

    def _call(self, read: Callable[[httpx.Response], Any], method: str, path: str, **options: Any) -> Any:
        with sentences(self._url):
            return read(self._http.request(method, path, **options))

    def _run(self, work: Callable[[], Any]) -> Any:
        return work()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Calls):
    """See the module. An asynchronous context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key)
        self._http = httpx.AsyncClient(**self._options)

    async def _call(self, read: Callable[[httpx.Response], Any], method: str, path: str, **options: Any) -> Any:
        with sentences(self._url):
            return read(await self._http.request(method, path, **options))

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(work)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@contextmanager
def _files_of(adapter: Any, config: Any) -> Iterator[list[tuple[str, str, BinaryIO]]]:
    """Part name, file name and open file of each file."""
    if isinstance(adapter, str | Path):
        if config is not None:
            raise TypeError("a directory has its own `config`; leave it out")
        with adapter_files(Path(adapter)) as files:
            yield files
            return
    if not isinstance(adapter, Mapping):
        from peft import get_peft_model_state_dict

        adapter_name = config or "default"
        config = adapter.peft_config[adapter_name]
        adapter = get_peft_model_state_dict(adapter, adapter_name=adapter_name)
    if config is None:
        raise TypeError("tensors need `config`: a LoraConfig, or the dict of adapter_config.json")
    fields = config if isinstance(config, Mapping) else config.to_dict()
    config_file = io.BytesIO(json.dumps(fields, default=_plain).encode())
    yield [("adapter_config", CONFIG, config_file), ("adapter_model", TENSORS, io.BytesIO(_safetensors(adapter)))]


def _safetensors(tensors: Mapping[str, Any]) -> bytes:
    if all(type(one).__module__.startswith("numpy") for one in tensors.values()):
        from numpy import ascontiguousarray
        from safetensors.numpy import save

        # It writes memory as it lies, whatever the strides are.
        return save({name: ascontiguousarray(one) for name, one in tensors.items()})
    from safetensors.torch import save as save_torch

    # It refuses tensors that share memory.
    return save_torch({name: one.detach().cpu().clone().contiguous() for name, one in tensors.items()})


def _plain(value: Any) -> Any:
    """A value of a LoraConfig that JSON does not have."""
    return value.value if isinstance(value, Enum) else sorted(value) if isinstance(value, set) else str(value)


def _version(report: Any) -> Version:
    return Version(report["name"], report["version"], report["digest"])


def _answer(response: httpx.Response) -> Answer:
    choices = answer_of(response, lambda body: list(body["choices"]))
    return Answer(response.headers.get("X-Multilora-Adapter", "").rpartition("sha256:")[2], choices)


def _nothing(response: httpx.Response) -> None:
    answer_of(response, lambda _: None)
