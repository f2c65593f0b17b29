"""Chat templates that came with uploaded adapters: compiled and rendered in a process of its own, with limits.

Such a template is a stranger's program: it may loop, grow, or keep Python's lock within one expression. Here it can
only end its own process. `TemplateWorker` is the parent's side, `python -m service.text.template_worker` the child's:
one JSON line in, one JSON line out, until its input ends.

Time is bounded by a timer of the kernel that counts the child's processor time and whose signal nobody handles; memory
by the child's address space. The sandbox of `service.text.chat_template` comes on top.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError

from service.child_process import child_environment
from service.text.chat_template import ChatTemplate, TemplateError
from service.text.tokenizer import TextError

log = logging.getLogger(__name__)

MAX_SECONDS = 1.0
MAX_NEW_BYTES = 512 << 20
MAX_TEXT_CHARS = 8 << 20
MAX_ERROR_CHARS = 1000
_MAX_COMPILED = 16
# Beginnings of the variables that the child gets: it runs strangers' programs.
_ENVIRONMENT = ("PYTHON", "PATH", "LD_LIBRARY_PATH", "LANG", "LC_", "TZ")
_OUT_OF_MEMORY = 3  # the child's exit code
_PROBE = [{"role": "user", "content": "probe of the cost"}]


class LimitError(TemplateError):
    """The template takes more time, memory or text than it may, or does what the sandbox forbids; `excess` says it."""

    excess = ""


class TemplateWorker:
    """Owns the child: started by the first template, started again after one that ended it, one template at a time.

    max_seconds  of processor time that one rendering may take
    thread       where requests wait for their turn: those who wait hold up no thread that uploads or other chats need
    """

    def __init__(self, max_seconds: float = MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-template")
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, job: Mapping[str, Any]) -> str:
        """The text of a job (`AdapterTemplate` builds them). TextError for a source that does not compile, LimitError,
        or TemplateError with the template's own words; RuntimeError or OSError if the child cannot work."""
        try:
            line = json.dumps(job).encode() + b"\n"
        except (ValueError, RecursionError) as error:  # a number too long, variables nested too deep
            raise TemplateError(f"The chat template failed on these messages: {error}.") from error
        with self._lock:
            was_fresh = self._child is None
            answer = self._ask(line)
            # The child may have been killed while it was idle, and what others had left there may have been too much.
            if isinstance(answer, int) and answer != -signal.SIGPROF and not was_fresh:
                answer = self._ask(line)
        if isinstance(answer, int):
            raise _ending(answer, self._max_seconds)
        if "text" in answer:
            return str(answer["text"])
        if answer["kind"] == "limit":
            raise _limit(answer["error"])
        raise TextError(answer["error"]) if answer["kind"] == "invalid" else TemplateError(answer["error"])

    def close(self) -> None:
        """End the child, after what it is rendering."""
        self.thread.shutdown(cancel_futures=True)
        with self._lock:
            if self._child is not None:
                self._end(self._child)

    def _ask(self, line: bytes) -> dict[str, str] | int:
        """The child's answer, or its exit code if it ended instead."""
        if self._child is None:
            self._child = _start(self._max_seconds)
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(line)
            child.stdin.flush()
            encoded = child.stdout.readline()
        except BrokenPipeError:
            encoded = b""
        if encoded.endswith(b"\n"):
            answer: dict[str, str] = json.loads(encoded)
            return answer
        return self._end(child)

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        self._child = None
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()
        return child.wait()


class AdapterTemplate:
    """An adapter's own chat template, with the `render` of `ChatTemplate`. Compiled in the child, when it is used."""

    def __init__(self, worker: TemplateWorker, source: str, special_tokens: Mapping[str, str]) -> None:
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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """As `ChatTemplate.render`; LimitError, a TemplateError, beyond the limits."""
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": dict(variables or {}),
        }
        return self._worker.render({**self._about, "messages": list(messages), "options": options})


def _start(max_seconds: float) -> subprocess.Popen[bytes]:
    """The child knows what an interpreter needs, and the time zone; nothing but answers may come out of it."""
    environment = {name: value for name, value in child_environment().items() if name.startswith(_ENVIRONMENT)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "service.text.template_worker", str(max_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _limit(excess: str) -> LimitError:
    error = LimitError(
        f"The adapter's chat template {excess}; shorten the messages, or upload the adapter with a simpler template."
    )
    error.excess = excess
    return error


def _ending(code: int, max_seconds: float) -> Exception:
    """What an exit code says: about the template if it got its process killed, about us if the process gave up."""
    if code == -signal.SIGPROF:
        return _limit(f"takes longer than {max_seconds:g} s")
    if code == _OUT_OF_MEMORY:
        return _limit(f"takes more than {MAX_NEW_BYTES >> 20} MiB of memory")
    if code < 0:
        return _limit(f"got its process killed by signal {-code}")
    return RuntimeError(f"the process of adapters' templates ended with exit code {code}")


# ---- the child's side


@functools.lru_cache(maxsize=_MAX_COMPILED)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _answer(line: bytes) -> dict[str, str]:
    """What the parent gets. MemoryError ends the child, since nobody knows what is left of it."""
    job = json.loads(line)
    try:
        template = _compiled(job["source"], tuple(job["special_tokens"].items()))
        text = template.render(job["messages"], **job["options"])
    except TextError as error:
        return {"kind": "invalid", "error": str(error)[:MAX_ERROR_CHARS]}
    except TemplateError as error:
        if isinstance(error.__cause__, MemoryError):
            raise MemoryError from error
        if isinstance(error.__cause__, SecurityError):
            return {"kind": "limit", "error": f"goes too far: {error.__cause__}"[:MAX_ERROR_CHARS]}
        return {"kind": "failed", "error": str(error)[:MAX_ERROR_CHARS]}
    if len(text) > MAX_TEXT_CHARS:
        return {"kind": "limit", "error": f"makes a text of more than {MAX_TEXT_CHARS} characters"}
    return {"text": text}


def _bound_memory() -> None:
    """At most so much more than there is now; a crash leaves no image of it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = num_pages * resource.getpagesize() + MAX_NEW_BYTES
    bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def main() -> int:
    """Until the parent ends, or one template has taken too much. Returns the exit code."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # they reach the whole process group; the parent judges them
        signal.signal(ignored, signal.SIG_IGN)
    _bound_memory()
    max_seconds = float(sys.argv[1])
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        try:
            encoded = json.dumps(_answer(line)).encode() + b"\n"
        except MemoryError:
            return _OUT_OF_MEMORY
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(encoded)
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    # Without the interpreter's clean-up: a template may have left little memory for it, and there is nothing to save.
    os._exit(main())
