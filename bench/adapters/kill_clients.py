"""Clients of a server that is killed beside them: each goes on until it is told to stop, or the server is gone."""

from __future__ import annotations

import abc
import json
import random
import threading

import httpx

from bench.adapters.kill_tenants import NAMES, Tenant
from tests.support.limits import LIMIT_SECONDS
from tests.support.name_changes import Change
from tests.support.peft_files import Files, adapter_files

WITH_TEMPLATE = (1, 3)  # of the contents
TEMPLATE = ("file", ("chat_template.jinja", b"{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"))
_ENDLESS_TOKENS = 400


class CutOff(Exception):
    """Whatever stands before the server says that it has lost the server."""


class KillClient(threading.Thread, abc.ABC):
    """`failure` is what came of its requests that may not.

    tenant      whose key it sends
    may_be_cut  whether what it is connected to may tell of the server's end, or end a stream where it is
    """

    def __init__(self, url: str, tenant: Tenant, *, may_be_cut: bool = False) -> None:
        super().__init__(daemon=True)
        self.url, self.tenant = url, tenant
        self.may_be_cut = may_be_cut
        self.is_cut = False
        self.failure: BaseException | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=LIMIT_SECONDS, headers=self.tenant.headers) as client:
                client.event_hooks["response"] = [self._look]
                while not self.stop.is_set():
                    self.ask(client)
        except (httpx.TransportError, CutOff) as error:
            self.is_cut = True
            if self.stop.is_set():
                self.failure = error  # told to stop: nobody has killed the server
        except BaseException as error:
            self.failure = error

    def _look(self, answer: httpx.Response) -> None:
        if self.may_be_cut and answer.status_code >= 500:
            raise CutOff(f"{answer.status_code}")

    @abc.abstractmethod
    def ask(self, client: httpx.Client) -> None:
        """One request."""

    def end(self) -> None:
        """Wait for it; raises its failure."""
        self.join(LIMIT_SECONDS)
        assert not self.is_alive(), "a request is not answered"
        if self.failure is not None:
            raise self.failure


class Mover(KillClient):
    """Makes changes of its tenant's adapters. `acknowledged` are those answered; `under_way` the one that was not."""

    def __init__(self, url: str, tenant: Tenant, seed: int, *, may_be_cut: bool = False) -> None:
        super().__init__(url, tenant, may_be_cut=may_be_cut)
        self._changes = tenant.changes(seed)
        self.acknowledged: list[Change] = []
        self.num_refused = 0
        self.under_way: Change | None = None

    def ask(self, client: httpx.Client) -> None:
        self.under_way = next(self._changes)
        if _make(client, self.tenant, self.under_way):
            self.acknowledged.append(self.under_way)
        else:
            self.num_refused += 1
        self.under_way = None


def _make(client: httpx.Client, tenant: Tenant, change: Change) -> bool:
    """Whether it was made."""
    what, name, content = change
    path = f"/v1/adapters/{name}"
    if what == "put":
        answer = client.put(path, files=upload_files(content))
        if answer.status_code == 400 and "template" in answer.text and content in WITH_TEMPLATE:
            return False
        answer.raise_for_status()
        return True
    if what == "visibility":
        visibility, shared_with = tenant.sharings[content]
        answer = client.patch(path, json={"visibility": visibility, "shared_with": shared_with})
    else:
        answer = client.delete(path) if what == "delete" else client.post(f"{path}/rollback", json={})
    assert answer.is_success or answer.status_code == 404, answer.text
    return True


def upload_files(content: int) -> Files:
    """Parts of an upload."""
    files = adapter_files(content)
    return [*files, TEMPLATE] if content in WITH_TEMPLATE else files


class Asker(KillClient):
    """Sends requests for what names of its tenant and others stand for, so that an engine reads and loads it, as
    `Mover` changes it.

    may_fail  whether a request may be lost, since there is no other engine to send it to
    """

    def __init__(self, url: str, tenant: Tenant, seed: int, *, may_fail: bool, may_be_cut: bool = False) -> None:
        super().__init__(url, tenant, may_be_cut=may_be_cut)
        self._models = (*NAMES, *(f"{other}/{name}" for other in tenant.others for name in NAMES[:1]), "base")
        self._generator = random.Random(seed)
        # No such name just now; the engine was killed under the request; there is none.
        self._may_be = (200, 404, 500, 503) if may_fail else (200, 404)
        self.num_answered = 0

    def ask(self, client: httpx.Client) -> None:
        num_tokens = self._generator.choice((2, 100))
        model = self._generator.choice(self._models)
        body = {"model": model, "prompt": "the", "max_tokens": num_tokens, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code in self._may_be, answer.text
        self.num_answered += answer.is_success


class Streamer(KillClient):
    """Reads long streams of the base, each of which must end as a whole or with an error event."""

    def __init__(self, url: str, tenant: Tenant, *, may_be_cut: bool = False) -> None:
        super().__init__(url, tenant, may_be_cut=may_be_cut)
        self.num_whole = self.num_ended = 0

    def ask(self, client: httpx.Client) -> None:
        body = {"model": "base", "prompt": "the", "max_tokens": _ENDLESS_TOKENS, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:  # there is no engine, which is for Asker to judge
                return
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        if self.may_be_cut and events[-1:] != ["[DONE]"]:
            raise CutOff("a stream")
        assert events and events[-1] == "[DONE]", f"a stream broke off: {events[-3:]}"
        has_error = len(events) > 1 and "error" in json.loads(events[-2])
        self.num_ended += has_error
        self.num_whole += not has_error
