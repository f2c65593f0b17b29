"""A server whose engine says what a test tells it to: all of the HTTP side, in this process, behind a real socket."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import transformers
from fastapi import FastAPI

from service.engine.ipc.client import EngineClient
from service.engine.ipc.config import EngineOptions
from service.engine.ipc.link import TokenStream
from service.engine.ipc.messages import Finished, Ready, Submit, Tokens
from service.server.app import create_app
from service.server.serve import listen, make_server
from service.settings import load_settings
from service.text.tokenizer import TextTokenizer
from tests.support.http.server import wait_for
from tests.support.limits import LIMIT_SECONDS


class ScriptedEngine(EngineClient):
    """Answers each request with the next of `texts`, the last one from then on: a token in each message, and an end
    token where there is room for it."""

    def __init__(self, options: EngineOptions, tokenizer: TextTokenizer, vocab_size: int, max_len_tokens: int) -> None:
        super().__init__(options)
        self.texts = [""]
        self._max_len_tokens = max_len_tokens
        self.submitted: list[Submit] = []
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    @property
    def last_prompt(self) -> str:
        """What the last request's template made."""
        return self._tokenizer.decode(self.submitted[-1].prompt_token_ids, skip_special_tokens=False)

    async def start(self) -> None:
        self._take(
            Ready(
                max_model_len_tokens=self._max_len_tokens,
                kv_capacity_tokens=self._max_len_tokens,
                vocab_size=self._vocab_size,
                hidden_size=1,
                dtype="float32",
                device="cpu",
                pid=os.getpid(),
            )
        )

    async def drain(self, limit_seconds: float) -> None:  # noqa: ARG002
        self._set_state("down")

    def submit(self, request: Submit) -> TokenStream:
        self.submitted.append(request)
        stream = TokenStream(request.request_id, self.abort)
        end = self._tokenizer.eos_token_ids[0]
        text = self.texts.pop(0) if self.texts[1:] else self.texts[0]
        token_ids = [*self._tokenizer.encode(text, add_special_tokens=False), end]
        loop, sent = asyncio.get_running_loop(), token_ids[: request.sampling.max_tokens]
        for token_id in sent:
            loop.call_soon(stream.push, Tokens(request.request_id, (token_id,)))
        finished = Finished(request.request_id, "length")
        if sent[-1] == end:
            finished = Finished(request.request_id, "stop", stop_token_id=end)
        loop.call_soon(stream.push, finished)
        return stream


@dataclass
class ScriptedServer:
    """`says` is what comes after this, whatever is asked; several texts are those of as many requests."""

    engine: ScriptedEngine
    client: openai.OpenAI

    @property
    def url(self) -> str:
        return str(self.client.base_url).removesuffix("/v1/")

    def says(self, *texts: str) -> None:
        self.engine.texts = list(texts)


def got(app: FastAPI, *paths: str, **options: Any) -> list[httpx.Response]:
    """The application's answers to a GET of each path, without a socket and without an engine."""

    async def get() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", **options) as client:
            return [await client.get(path) for path in paths]

    return asyncio.run(get())


def make_text_model(base: Path, directory: Path, chat_template: str, special_tokens: tuple[str, ...] = ()) -> Path:
    """A copy of a model whose chat template and special tokens are others; returns `directory`."""
    shutil.copytree(base, directory)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special_tokens)})
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def scripted_server(
    model_dir: Path, store_dir: Path, *, max_len_tokens: int = 8192, **settings: Any
) -> Iterator[ScriptedServer]:
    """Without LoRA, on a free port."""
    made = load_settings(model_dir=model_dir, store_dir=store_dir, adapter_row_bytes=0, **settings)
    tokenizer = TextTokenizer.load(model_dir)
    engine = ScriptedEngine(made.engine_options(), tokenizer, tokenizer.vocab_size, max_len_tokens)
    server = make_server(create_app(made, engine), made)
    with listen("127.0.0.1", 0) as listener:
        url = "http://{}:{}/v1".format(*listener.getsockname())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive(), "the server to listen")
            with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=LIMIT_SECONDS) as client:
                yield ScriptedServer(engine, client)
        finally:
            server.should_exit = True
            thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()
