"""Chat templates that came with uploaded adapters: compiled and rendered in a process of its own, with limits.

Such a template is a stranger's program: it may loop, grow, or keep Python's lock within one expression. Here it can
only end its own process (`adapters.isolation.bounded_child`), which reaches no files and no network
(`adapters.isolation.confinement`). `TemplateWorker` is the parent's side, `python -m service.text.template_worker` the
child's. The sandbox of `service.text.chat_template` comes on top.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from jinja2.exceptions import SecurityError

from adapters.isolation.bounded_child import BoundedChild, excess_of
from adapters.isolation.confinement import serve
from service.fairness.client_identity import CLIENT
from service.fairness.thread_pool import FairPool
from service.text.chat_template import ChatTemplate
from service.text.template_sandbox import TemplateError
from service.text.tokenizer import TextError

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_SECONDS = 1.0
MAX_TEXT_BYTES = 8 << 20  # in UTF-8
MAX_ERROR_CHARS = 1000
_MAX_COMPILED = 16
NUM_WORKERS = 2
_PROBE = [{"role": "user", "content": "probe of the cost"}]
# Modules that jinja2 and Python import only when a template needs them; a confined process finds no modules.
_LAZY_MODULES = ("html", "jinja2.debug", "linecache", "pprint", "random", "textwrap", "tracemalloc")
_LAZY_CODECS = (
    "ascii",
    "latin-1",
    "utf-8",
    "utf-16",
    "utf-32",
    "unicode-escape",
    "raw-unicode-escape",
    "idna",
    "punycode",
)


class LimitError(TemplateError):
    """The template takes more time, memory or text than it may, or does what the sandbox forbids; `excess` says it."""

    excess = ""


class TemplateWorker(BoundedChild):
    """Compiles and renders, one template at a time.

    max_seconds  of processor time that one rendering may take
    """

    def __init__(self, max_seconds: float = MAX_SECONDS) -> None:
        super().__init__("service.text.template_worker", [str(max_seconds)])
        self._max_seconds = max_seconds

    def render(self, job: Mapping[str, Any]) -> str:
        """The text of a job (`AdapterTemplate` builds them). TextError for a source that does not compile, LimitError,
        or TemplateError with the template's own words; RuntimeError or OSError if the child cannot work."""
        try:
            line = json.dumps(job).encode() + b"\n"
        except (ValueError, RecursionError) as error:  # a number too long, variables nested too deep
            raise TemplateError(f"The chat template failed on these messages: {error}.") from error
        answer = self.ask(line)
        if isinstance(answer, int):
            excess = excess_of(answer, self._max_seconds)
            if excess is not None:
                raise _limit(excess)
            raise RuntimeError(f"the process of adapters' templates ended with exit code {answer}")
        if "text" in answer:
            return str(answer["text"])
        if answer["kind"] == "limit":
            raise _limit(answer["error"])
        raise TextError(answer["error"]) if answer["kind"] == "invalid" else TemplateError(answer["error"])


class TemplateWorkers:
    """A few such children, each with a thread of its own, where requests wait for their turn: those who wait hold up no
    thread that uploads or other chats need. No client has all of them."""

    def __init__(self, num_workers: int = NUM_WORKERS, max_seconds: float = MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._workers: list[TemplateWorker] = []
        self._of_thread = threading.local()
        self._pool = FairPool(num_workers, "adapter-template", self._add_worker)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work`, which may `render`, when it is the client's turn."""
        return self._pool.submit(CLIENT.get(), work)

    def render(self, job: Mapping[str, Any]) -> str:
        """As `TemplateWorker.render`. Elsewhere than in `submit`'s work it waits for the client's turn."""
        worker: TemplateWorker | None = getattr(self._of_thread, "worker", None)
        if worker is None:
            return self.submit(lambda: self.render(job)).result()
        return worker.render(job)

    def close(self) -> None:
        """End the children, after what they are rendering."""
        self._pool.close()
        for worker in self._workers:
            worker.close()

    def _add_worker(self) -> None:
        worker = self._of_thread.worker = TemplateWorker(self._max_seconds)
        self._workers.append(worker)


class Renderer(Protocol):
    """Renders the jobs of an `AdapterTemplate`: one worker, or several."""

    def render(self, job: Mapping[str, Any]) -> str:
        """As `TemplateWorker.render`."""


class AdapterTemplate:
    """An adapter's own chat template, with the `render` of `ChatTemplate`. Compiled in the child, when it is used."""

    def __init__(self, worker: Renderer, source: str, special_tokens: Mapping[str, str]) -> None:
        self._worker = worker
        self._about = {"source": source, "special_tokens": dict(special_tokens)}

    @property
    def source(self) -> str:
        """The template's text."""
        return str(self._about["source"])

    def check(self) -> None:
        """TextError if the template does not compile, or exceeds its limits already on a short message. That it
        refuses the message is its right."""
        try:
            self.render(_PROBE)
        except LimitError as error:
            raise TextError(f"The chat template is refused: for a short message already, it {error.excess}.") from error
        except TemplateError as error:
            log.debug("an uploaded chat template refuses the probe: %s", error)

    def shows_tools(self) -> bool:
        """As `ChatTemplate.shows_tools`; LimitError beyond the limits."""
        return bool(self._worker.render({**self._about, "asks": "shows_tools"}))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        writes_tools: bool = False,
    ) -> str:
        """As `ChatTemplate.render`; LimitError, a TemplateError, beyond the limits."""
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "variables": dict(variables or {}),
            "writes_tools": writes_tools,
        }
        return self._worker.render({**self._about, "messages": list(messages), "options": options})


def _limit(excess: str) -> LimitError:
    error = LimitError(
        f"The adapter's chat template {excess}; shorten the messages, or upload the adapter with a simpler template."
    )
    error.excess = excess
    return error


# ---- the child's side


@functools.lru_cache(maxsize=_MAX_COMPILED)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _answer(line: bytes) -> dict[str, str]:
    """The answer to the parent. MemoryError ends the child, since its state is unknown afterwards."""
    job = json.loads(line)
    try:
        template = _compiled(job["source"], tuple(job["special_tokens"].items()))
        if job.get("asks") == "shows_tools":
            return {"text": "yes" if template.shows_tools() else ""}
        text = template.render(job["messages"], **job["options"])
    except TextError as error:
        return {"kind": "invalid", "error": str(error)[:MAX_ERROR_CHARS]}
    except TemplateError as error:
        if isinstance(error.__cause__, MemoryError):
            raise MemoryError from error
        if isinstance(error.__cause__, SecurityError):
            return {"kind": "limit", "error": f"goes too far: {str(error.__cause__).rstrip('.')}"[:MAX_ERROR_CHARS]}
        return {"kind": "failed", "error": str(error)[:MAX_ERROR_CHARS]}
    if len(text) > MAX_TEXT_BYTES or len(text.encode(errors="surrogatepass")) > MAX_TEXT_BYTES:
        return {"kind": "limit", "error": f"makes a text of more than {MAX_TEXT_BYTES} bytes"}
    return {"text": text}


def main() -> int:
    """Returns the exit code."""
    for name in _LAZY_MODULES:
        importlib.import_module(name)
    for name in _LAZY_CODECS:
        codecs.lookup(name)
    time.tzset()
    return serve(_answer, max_seconds=float(sys.argv[1]))


if __name__ == "__main__":
    os._exit(main())
