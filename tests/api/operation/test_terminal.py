"""The commands at a real terminal, with a real server."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import BASE
from tests.support.http.server import Server, standing_still, wait_for
from tests.support.http.terminal import Terminal, terminal

ROOT = Path(__file__).resolve().parents[3]
PROMPT = "> "


@contextmanager
def chatting(url: str, *arguments: str) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "service.cli.main", "chat", f"--url={url}", *arguments]
    with terminal(command, ROOT) as opened:
        opened.read_until(PROMPT)
        yield opened


class TestChatWithAServer:
    def test_commands(self, server: Server) -> None:
        with chatting(server.url, "--max-tokens=3") as chat:
            chat.type("/help\n")
            shown = chat.read_until("at the prompt it ends the chat.")
            assert all(command in shown for command in ("/adapter NAME", "/reset", "/help", "/quit"))
            chat.type("/adapter alpha\n")
            chat.read_until("alpha is asked from now on")
            chat.type("/adapter nobody\n")
            chat.read_until("`nobody` does not exist")
            chat.type("/adapter\n")
            chat.read_until("/adapter wants a name; alpha is asked now")
            chat.type("/nonsense\n")
            chat.read_until("/nonsense is no command")
            before = server.metric("requests_total", adapter="alpha")
            chat.type("hello\n")
            wait_for(lambda: server.metric("requests_total", adapter="alpha") == before + 1, "alpha's answer")
            chat.type("/quit\n")
            assert chat.read_to_end()[0] == 0

    def test_ctrl_c_ends_the_answer_and_then_the_chat(self, server: Server) -> None:
        aborted = {"adapter": BASE, "outcome": "abort"}
        before = server.metric("requests_total", **aborted)
        with chatting(server.url) as chat:
            # So that the answer is still awaited when Ctrl-C comes.
            with standing_still(*server.engine_pids()):
                chat.type("hello\n")
                wait_for(lambda: server.metric("num_requests_open") == 1, "the request")
                chat.type("\x03")
                chat.read_until("ended before it began")
                wait_for(lambda: server.metric("num_requests_open") == 0, "the end of the request")
            chat.read_until(PROMPT)
            assert server.metric("requests_total", **aborted) == before + 1
            chat.type("/help\n")
            chat.read_until("/quit")
            chat.read_until(PROMPT)
            assert chat.interrupt_to_end()[0] == 130

    def test_the_end_of_the_input_ends_the_chat(self, server: Server) -> None:
        with chatting(server.url) as chat:
            chat.type("\x04")
            assert chat.read_to_end()[0] == 0


class _Recorder(ThreadingHTTPServer):
    """Answers a chat with one piece of text, keeps what it was asked, and goes on with "wait" until it is left."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[list[dict[str, Any]]] = []


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, _Recorder)
        self.server.asked.append(body["messages"])
        if body["messages"][-1]["content"] == "fail":
            self.send_error(500)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        event = {"choices": [{"delta": {"content": f"answer {len(self.server.asked)}"}}]}
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        if body["messages"][-1]["content"] == "wait":
            self.rfile.read(1)  # until the client hangs up
            return
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[_Recorder]:
    with _Recorder() as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield listener
        listener.shutdown()
        thread.join()


def test_what_is_sent_of_the_chat_so_far(recorder: _Recorder) -> None:
    """All that was said, as far as it came: an answer that was ended stays, a question without an answer goes."""
    url = f"http://127.0.0.1:{recorder.server_port}"
    with chatting(url, "--adapter=one", "--system=be brief") as chat:
        chat.type("first\n")
        chat.read_until("answer 1")
        chat.read_until(PROMPT)
        chat.type("wait\n")
        chat.read_until("answer 2")
        chat.type("\x03")
        chat.read_until("what was said is kept")
        chat.read_until(PROMPT)
        chat.type("fail\n")
        chat.read_until("status 500")
        chat.read_until(PROMPT)
        chat.type("//etc\n")
        chat.read_until("answer 4")
        chat.read_until(PROMPT)
        chat.type("/reset\n")
        chat.read_until("a new chat")
        chat.read_until(PROMPT)
        chat.type("last\n")
        chat.read_until("answer 5")
        chat.read_until(PROMPT)
    system = ("system", "be brief")
    said = [[(one["role"], one["content"]) for one in messages] for messages in recorder.asked]
    kept = [system, ("user", "first"), ("assistant", "answer 1"), ("user", "wait"), ("assistant", "answer 2")]
    assert said == [
        kept[:2],
        kept[:4],
        [*kept, ("user", "fail")],
        [*kept, ("user", "/etc")],
        [system, ("user", "last")],
    ]
