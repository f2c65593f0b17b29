"""Templates of adapters render in a process of their own, which they can take down and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from service.child_process import child_environment
from service.text.chat_template import ChatTemplate, TemplateError
from service.text.template_worker import AdapterTemplate, LimitError, TemplateWorker
from service.text.tokenizer import TextError
from tests.api.test_chat_template import CHATS, TEMPLATES
from tests.support.server import is_alive, wait_for

ORDINARY = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
# (source, what the sentence about it says)
COSTLY = {
    "time": (ENDLESS, "takes longer than 1 s"),
    "time in one expression": ("{{ " + " ~ ".join(["range(99999)|list|string|length"] * 500) + " }}", "takes longer"),
    "doubling": (
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "more than 512 MiB of memory",
    ),
    "memory in one expression": (
        "{% set a = 'x' * 1000000 %}{{ " + " ~ ".join(["a"] * 2_000) + " }}",
        "more than 512 MiB of memory",
    ),
    "a long text": ("{% set a = 'x' * 1000000 %}{{ " + " ~ ".join(["a"] * 9) + " }}", "more than 8388608 characters"),
    "percent": ("{{ ('%300000000s' % 'a')|length }}", "too wide"),
    "ljust": ("{{ 'a'.ljust(3000000000)|length }}", "too far"),
    "format": ("{{ '{:>3000000000}'.format('a')|length }}", "too wide"),
    "format argument": ("{{ '{:>{}}'.format('a', 3000000000)|length }}", "too wide"),
    "replace": ("{{ ('a' * 1000000).replace('a', 'b' * 1000000)|length }}", "too long a text"),
    "center": ("{{ 'a'|center(3000000000)|length }}", "too far"),
}


@pytest.fixture
def worker() -> Iterator[TemplateWorker]:
    opened = TemplateWorker()
    yield opened
    opened.close()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_there_as_it_does_here(worker: TemplateWorker, name: str) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    here, there = ChatTemplate(TEMPLATES[name], tokens), AdapterTemplate(worker, TEMPLATES[name], tokens)
    there.check()
    for chat in CHATS:
        outcomes = []
        for template in (here, there):
            try:
                outcomes.append(template.render(chat, variables={"enable_thinking": False}))
            except TemplateError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_template_is_refused_and_the_next_one_renders(name: str) -> None:
    source, words = COSTLY[name]
    # On a slow machine memory may take its time to run out.
    worker = TemplateWorker(max_seconds=1.0 if "longer" in words else 60.0)
    try:
        costly = AdapterTemplate(worker, source, {})
        with pytest.raises(TextError, match=words):
            costly.check()
        with pytest.raises(LimitError, match=words):
            costly.render(HELLO)
        assert AdapterTemplate(worker, ORDINARY, {}).render(HELLO) == "user: hello\n"
    finally:
        worker.close()


def test_a_source_that_does_not_compile_is_refused(worker: TemplateWorker) -> None:
    with pytest.raises(TextError, match="not valid jinja2"):
        AdapterTemplate(worker, "{% for", {}).check()


def test_a_template_may_refuse_the_probe_and_says_why_later(worker: TemplateWorker) -> None:
    template = AdapterTemplate(worker, "{{ raise_exception('x' * 5000) }}", {})
    template.check()
    with pytest.raises(TemplateError) as caught:
        template.render(HELLO)
    assert not isinstance(caught.value, LimitError)
    assert str(caught.value) == "x" * 1000


@pytest.mark.parametrize("variable", [10**5000, "\ud800", float("inf")], ids=["number", "surrogate", "infinity"])
def test_any_variable_is_an_answer_or_a_sentence(worker: TemplateWorker, variable: Any) -> None:
    template = AdapterTemplate(worker, "{{ x }}", {})
    if isinstance(variable, int):
        with pytest.raises(TemplateError, match="failed on these messages"):
            template.render(HELLO, variables={"x": variable})
    else:
        assert template.render(HELLO, variables={"x": variable}) == str(variable)


def test_long_messages_go_through(worker: TemplateWorker) -> None:
    long = "é" * 1_000_000
    assert AdapterTemplate(worker, ORDINARY, {}).render([{"role": "user", "content": long}]) == f"user: {long}\n"


def test_many_threads_get_their_own_answers(worker: TemplateWorker) -> None:
    def one(index: int) -> str:
        return AdapterTemplate(worker, f"{index} {{{{ messages[0].content }}}}", {}).render(HELLO)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(100))) == [f"{index} hello" for index in range(100)]


def test_a_child_that_others_have_filled_is_no_fault_of_the_next(
    worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled templates are kept there. What does not fit beside them is rendered by a fresh child."""
    template = AdapterTemplate(worker, ORDINARY, {})
    template.render(HELLO)
    ask, first = worker._ask, worker._child
    assert first is not None

    def full(line: bytes) -> dict[str, str] | int:
        if worker._child is not first:
            return ask(line)
        worker._end(first)
        return 3

    monkeypatch.setattr(worker, "_ask", full)
    assert template.render(HELLO) == "user: hello\n"
    assert worker._child is not first


def test_a_child_that_was_killed_is_replaced_and_one_that_cannot_work_is_our_fault(
    worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = AdapterTemplate(worker, ORDINARY, {})
    template.render(HELLO)
    assert worker._child is not None
    worker._child.kill()
    assert template.render(HELLO) == "user: hello\n"
    worker._child.kill()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/bin/false")
        with pytest.raises(RuntimeError, match="exit code 1"):
            template.render(HELLO)
    assert template.render(HELLO) == "user: hello\n"


def test_the_child_knows_no_settings(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MULTILORA_API_KEYS", "HF_TOKEN", "DATABASE_URL"):
        monkeypatch.setenv(name, "a-secret")
    AdapterTemplate(worker, ORDINARY, {}).render(HELLO)
    assert worker._child is not None
    assert b"a-secret" not in Path(f"/proc/{worker._child.pid}/environ").read_bytes()


def test_no_child_gets_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine needs what its libraries read from the environment, and nothing that opens a door."""
    kept = {"CUDA_VISIBLE_DEVICES": "0", "TRITON_CACHE_DIR": "x", "TOKENIZERS_PARALLELISM": "true", "KEYBOARD": "x"}
    secret = ("MULTILORA_ADMIN_API_KEYS", "multilora_api_keys", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password")
    for name, value in {**kept, **dict.fromkeys(secret, "a-secret")}.items():
        monkeypatch.setenv(name, value)
    environment = child_environment()
    assert kept.items() <= environment.items()
    assert "a-secret" not in environment.values()
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(__file__).resolve().parents[2])


def test_the_child_ends_with_close(worker: TemplateWorker) -> None:
    AdapterTemplate(worker, ORDINARY, {}).render(HELLO)
    child = worker._child
    assert child is not None
    worker.close()
    assert child.returncode == 0


PARENT = """
import sys
from service.text.template_worker import AdapterTemplate, TemplateWorker
worker = TemplateWorker()
AdapterTemplate(worker, "x", {}).render([{"role": "user", "content": ""}])
print(worker._child.pid, flush=True)
AdapterTemplate(worker, sys.argv[1], {}).render([{"role": "user", "content": ""}])
sys.stdin.read()
"""


@pytest.mark.parametrize("source", ["x", ENDLESS], ids=["idle", "busy"])
def test_the_child_ends_when_its_parent_is_killed(source: str) -> None:
    """A busy one at the latest when its time is over."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_alive(child_pid), "the child to end")
