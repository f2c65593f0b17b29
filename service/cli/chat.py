"""`multilora chat`: one answer, or a chat with its history and commands at a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from service.cli.client import ClientError, answer_of, checked, connect, events, path_of, sentences, utf8

_HELP = """\
/adapter NAME  ask this adapter, or the base by its own name, from now on; the chat so far goes along
/reset         forget the chat so far
/help          show these lines
/quit          end, like Ctrl-D
//...          a message that begins with one slash
Ctrl-C ends an answer; at the prompt it ends the chat."""


def chat(arguments: argparse.Namespace) -> int:
    """Chat until the end of the input; with a message on the command line, one answer."""
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        talk = _Chat(client, arguments)
        if not arguments.message:
            return talk.run()
        talk.messages.append({"role": "user", "content": " ".join(arguments.message)})
        talk.show_answer(lambda _: None)
    return 0


class _Chat:
    """The conversation so far, and the model that answers next."""

    def __init__(self, client: httpx.Client, arguments: argparse.Namespace) -> None:
        self._client = client
        self._arguments = arguments
        self._console = Console(highlight=False)
        self._model: str = arguments.adapter or _base_name(client)
        self.messages: list[dict[str, str]] = []
        self._reset()

    def run(self) -> int:
        """Until the end of the input, /quit, or Ctrl-C at the prompt."""
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 (editing and recalling of lines, by being there)
        self._note(f"{self._model} - /help lists the commands, Ctrl-D ends")
        while (said := _read_line()) is not None:
            command, _, rest = said.strip().partition(" ")
            if not command:
                continue
            if not command.startswith("/") or command.startswith("//"):
                self._ask(said.removeprefix("/") if command.startswith("//") else said)
            elif command == "/quit":
                break
            else:
                self._obey(command, rest.strip())
        return 0

    def _obey(self, command: str, rest: str) -> None:
        commands: dict[str, Callable[[], None]] = {
            "/adapter": lambda: self._switch(rest),
            "/reset": self._reset,
            "/help": lambda: self._note(_HELP),
        }
        if command not in commands:
            self._complain(f"{command} is no command; /help lists them, and // begins a message with a slash.")
            return
        try:
            with sentences(self._arguments.url):
                commands[command]()
        except ClientError as error:
            self._complain(str(error))

    def _reset(self) -> None:
        if self.messages:
            self._note("a new chat")
        system = self._arguments.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def _switch(self, name: str) -> None:
        if not name:
            raise ClientError(
                f"/adapter wants a name; {self._model} is asked now, and multilora ls lists the adapters."
            )
        self._model = answer_of(self._client.get(path_of("/v1/models", name)), lambda card: str(card["id"]))
        self._note(f"{self._model} is asked from now on; /reset forgets the chat so far")

    def _ask(self, said: str) -> None:
        """One question and its answer, as far as it came. Neither is kept if there is none."""
        self.messages.append({"role": "user", "content": said})
        pieces: list[str] = []
        try:
            with sentences(self._arguments.url):
                self.show_answer(pieces.append)
        except KeyboardInterrupt:
            print()
            self._note("ended here; what was said is kept" if pieces else "ended before it began")
        except ClientError as error:
            if pieces:
                print()
            self._complain(str(error))
            pieces.clear()
        if pieces:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self.messages.pop()

    def show_answer(self, keep: Callable[[str], None]) -> None:
        """Stream the answer to the last message to the terminal; `keep` gets every piece that is shown."""
        options = {"temperature": self._arguments.temperature, "max_tokens": self._arguments.max_tokens}
        # All that the model writes is shown as it comes, thoughts too.
        shown = {"stream": True, "separate_reasoning": False}
        body = {"model": self._model, "messages": self.messages, **shown, **options}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            for piece in events(checked(response), _piece):
                if piece:
                    keep(piece)  # before it is shown: Ctrl-C may come right after
                    print(piece, end="", flush=True)
        print(flush=True)

    def _note(self, text: str) -> None:
        self._console.print(f"[dim]{escape(text)}[/dim]", soft_wrap=True)

    def _complain(self, sentence: str) -> None:
        self._console.print(f"[red]{escape(sentence)}[/red]", soft_wrap=True)


def _read_line() -> str | None:
    """The line typed at the prompt; None at the end of the input. ClientError for input that is not UTF-8."""
    with utf8("message"):
        try:
            said = input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()  # what the shell shows next begins a line
            raise
        said.encode()
    return said


def _piece(event: Any) -> str:
    return str(event["choices"][0]["delta"].get("content") or "")


def _base_name(client: httpx.Client) -> str:
    def base(body: Any) -> str:
        return str(next(card["id"] for card in body["data"] if card["parent"] is None))

    return answer_of(client.get("/v1/models"), base)
