"""Templates of adapters render in a process of their own, which they can take down and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import jinja2.filters
import pytest

from adapters.isolation.bounded_child import BoundedChild
from adapters.isolation.confinement import OUT_OF_MEMORY
from kernels.child_process import child_environment
from service.fairness.client_identity import CLIENT
from service.text.chat_template import ChatTemplate
from service.text.template_sandbox import TemplateError
from service.text.template_worker import AdapterTemplate, LimitError, TemplateWorker, TemplateWorkers
from service.text.tokenizer import TextError
from tests.api.admission.test_chat_template import CHATS, TEMPLATES
from tests.support.http.noted_children import noted_children
from tests.support.http.server import is_alive, wait_for
from tests.support.http.tool_templates import TEMPLATES as TOOL_TEMPLATES
from tests.support.limits import LIMIT_SECONDS

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
    "a long text": ("{% set a = 'x' * 1000000 %}{{ " + " ~ ".join(["a"] * 9) + " }}", "more than 8388608 bytes"),
    "a long text of four bytes a character": (
        "{% set a = '\U0001f600' * 1000000 %}{{ a ~ a ~ a }}",
        "more than 8388608 bytes",
    ),
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


def test_a_template_shows_tools_there_as_it_does_here(worker: TemplateWorker) -> None:
    shown = {}
    for name, source in {**TOOL_TEMPLATES, "none": ORDINARY, "named alone": ORDINARY + "{# tools #}"}.items():
        shown[name] = ChatTemplate(source, {}).shows_tools()
        assert AdapterTemplate(worker, source, {}).shows_tools() == shown[name]
    assert shown == {**dict.fromkeys(TOOL_TEMPLATES, True), "none": False, "named alone": False}


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


def test_a_child_that_others_have_filled_is_no_fault_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled templates are kept there. What does not fit beside them is rendered by a fresh child."""
    started = noted_children(monkeypatch)
    child = BoundedChild("tests.support.http.odd_child", ["", "2", str(OUT_OF_MEMORY)])
    try:
        assert [child.ask(b"{}\n") for _ in range(3)] == [{"pid": started[at].pid} for at in (0, 0, 1)]
        assert [one.returncode for one in started] == [OUT_OF_MEMORY, None]
    finally:
        child.close()


def test_what_is_too_much_for_a_fresh_child_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = noted_children(monkeypatch)
    child = BoundedChild("tests.support.http.odd_child", ["", "0", str(OUT_OF_MEMORY)])
    assert child.ask(b"{}\n") == OUT_OF_MEMORY
    assert len(started) == 1
    child.close()


def test_a_child_that_was_killed_is_replaced_and_one_that_cannot_work_is_our_fault(
    worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = noted_children(monkeypatch)
    template = AdapterTemplate(worker, ORDINARY, {})
    template.render(HELLO)
    started[-1].kill()
    assert template.render(HELLO) == "user: hello\n"
    started[-1].kill()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/bin/false")
        with pytest.raises(RuntimeError, match="exit code 1"):
            template.render(HELLO)
    assert template.render(HELLO) == "user: hello\n"


def test_the_child_knows_no_settings(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MULTILORA_API_KEYS", "HF_TOKEN", "DATABASE_URL"):
        monkeypatch.setenv(name, "a-secret")
    started = noted_children(monkeypatch)
    AdapterTemplate(worker, ORDINARY, {}).render(HELLO)
    (child,) = started
    assert b"a-secret" not in Path(f"/proc/{child.pid}/environ").read_bytes()


def test_the_child_has_less_claim_to_processors(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than the event loop and the engine, which have this process's."""
    started = noted_children(monkeypatch)
    AdapterTemplate(worker, ORDINARY, {}).render(HELLO)
    (child,) = started
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)


def test_no_child_gets_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine needs what its libraries read from the environment, and nothing that opens a door."""
    kept = {"CUDA_VISIBLE_DEVICES": "0", "TRITON_CACHE_DIR": "x", "TOKENIZERS_PARALLELISM": "true", "KEYBOARD": "x"}
    secret = ("MULTILORA_ADMIN_API_KEYS", "multilora_api_keys", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password")
    for name, value in {**kept, **dict.fromkeys(secret, "a-secret")}.items():
        monkeypatch.setenv(name, value)
    environment = child_environment()
    assert kept.items() <= environment.items()
    assert "a-secret" not in environment.values()
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(__file__).resolve().parents[3])


def test_the_child_ends_with_close(worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    started = noted_children(monkeypatch)
    AdapterTemplate(worker, ORDINARY, {}).render(HELLO)
    (child,) = started
    worker.close()
    assert child.returncode == 0


PARENT = """
import subprocess, sys
from service.text.template_worker import AdapterTemplate, TemplateWorker
popen, started = subprocess.Popen, []
subprocess.Popen = lambda *arguments, **options: started.append(popen(*arguments, **options)) or started[-1]
worker = TemplateWorker()
AdapterTemplate(worker, "x", {}).render([{"role": "user", "content": ""}])
print(started[0].pid, flush=True)
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


# Every filter of jinja2 with what it takes, so that whatever one of them imports late is found to be there.
FILTERED = {
    "abs": "-1",
    "attr": "'x'|attr('upper')",
    "batch": "[1, 2]|batch(2)|list",
    "capitalize": "'a'",
    "center": "'a'",
    "count": "'a'",
    "d": "x",
    "default": "x",
    "dictsort": "{'a': 1}",
    "e": "'<'",
    "escape": "'<'",
    "filesizeformat": "10000",
    "first": "[1]",
    "float": "'1'",
    "forceescape": "'<'",
    "format": "'%s'|format(1)",
    "groupby": "[{'a': 1}]|groupby('a')",
    "indent": "'a\nb'",
    "int": "'1'",
    "items": "{'a': 1}|items|list",
    "join": "[1]",
    "last": "[1]",
    "length": "[1]",
    "list": "'ab'",
    "lower": "'A'",
    "map": "['a']|map('upper')|list",
    "max": "[1]",
    "min": "[1]",
    "pprint": "{'a': [1]}",
    "random": "[1]",
    "reject": "[1]|reject|list",
    "rejectattr": "[{'a': 1}]|rejectattr('a')|list",
    "replace": "'a'|replace('a', 'b')",
    "reverse": "'ab'",
    "round": "1.5",
    "safe": "'<'",
    "select": "[1]|select|list",
    "selectattr": "[{'a': 1}]|selectattr('a')|list",
    "slice": "[1, 2]|slice(2)|list",
    "sort": "[2, 1]",
    "string": "1",
    "striptags": "'<a>b'",
    "sum": "[1]",
    "title": "'a'",
    "tojson": "{'a': 'é'}",
    "trim": "' a '",
    "truncate": "'a b' * 200",
    "unique": "[1, 1]|unique|list",
    "upper": "'a'",
    "urlencode": "'a b&'",
    "urlize": "'see http://a.example/ and a@b.example'",
    "wordcount": "'a b'",
    "wordwrap": "'a b ' * 60",
    "xmlattr": "{'a': 1}",
}
# Texts that hold an object of Python's, got in as many ways.
OBJECTS = (
    "{}.keys",
    "{}.keys ~ ''",
    "[{}.keys]",
    "[{}.keys]|pprint",
    "'%s %r' % ({}.keys, {}.keys)",
    "'{} {!r}'.format({}.keys, {}.keys)",
    "{'a': {}.keys}|string",
    "[{}]|map(attribute='keys')|list",
    "[{}]|map(attribute='keys')|join",
    "''|attr('upper')",
    "messages|map('upper')",
    "messages|reverse",
    "messages|batch(2)",
    "{}|items",
    "cycler(1)",
    "joiner()",
    "lipsum",
    "range",
    "raise_exception",
    "strftime_now",
    "dict",
    "namespace",
    "(1).to_bytes",
    "'x'.format",
    "self",
    "loop",
    "raise_exception({}.keys)",
    "{}[{}.keys]",
    "messages[0].content.upper",
    "namespace(a={}.keys)",
    "dict(a={}.keys)",
    "range(3).index",
    "{}.keys|tojson",
    "{}.keys + 1",
    "cycler({}.keys).next()",
    "{}.items()|map('first')",
    "[[{}.keys]]|sum(start=[])",
)


def test_every_filter_works_in_confinement(worker: TemplateWorker) -> None:
    known = set(jinja2.filters.FILTERS)
    assert known <= FILTERED.keys(), f"say how to use {known - FILTERED.keys()}"
    for name, source in FILTERED.items():
        whole = source if f"|{name}" in source else f"({source})|{name}"
        text = "{{ " + whole + " }}"
        assert AdapterTemplate(worker, text, {}).render(HELLO) == ChatTemplate(text, {}).render(HELLO), whole


@pytest.mark.parametrize("source", OBJECTS)
def test_no_template_tells_an_address(worker: TemplateWorker, source: str) -> None:
    for text in (f"{{{{ {source} }}}}", f"{{% block b %}}{{{{ self.b }}}}{{% endblock %}}{{{{ ({source})|string }}}}"):
        try:
            told = AdapterTemplate(worker, text, {}).render(HELLO)
        except TemplateError as error:
            told = str(error)
        assert "0x" not in told


CONFINED = """
import os, socket, sys, threading
from adapters.isolation.confinement import confine
confined, told = threading.Event(), []
def read_later():
    confined.wait()
    told.append(tries(lambda: open(sys.argv[1])))
earlier = threading.Thread(target=read_later)
earlier.start()
missing = confine()
def tries(act):
    try:
        act()
    except (OSError, RuntimeError) as error:
        return type(error).__name__
    return "done"
acts = {
    "read": lambda: open(sys.argv[1]),
    "list": lambda: os.listdir("/"),
    "write": lambda: open(sys.argv[1], "w"),
    "socket": lambda: socket.socket().connect(("127.0.0.1", int(sys.argv[2]))),
    "local socket": lambda: socket.socket(socket.AF_UNIX),
    "process": os.fork,
    "program": lambda: os.execv(sys.executable, [sys.executable, "-V"]),
    "thread": lambda: threading.Thread(target=print).start(),
    "signal": lambda: os.kill(os.getppid(), 0),
}
confined.set()
earlier.join()
print(missing, {name: tries(act) for name, act in acts.items()}, told)
"""


def test_a_confined_process_reaches_nothing(tmp_path: Path) -> None:
    """On this kernel: where Landlock or seccomp is missing, the child says so, and this test with it."""
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", CONFINED, str(tmp_path / "secret"), port],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=True,
        )
    assert done.stdout.startswith("[] {"), f"this kernel does not confine: {done.stdout}"
    assert "done" not in done.stdout
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_kernel_that_confines_nothing_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    missing = f"no seccomp for {uuid4()}"  # once for each that is missing
    with caplog.at_level("WARNING"):
        for _ in range(2):
            child = BoundedChild("tests.support.http.odd_child", [missing, "1", "0"])
            assert isinstance(child.ask(b"{}\n"), dict)
            child.close()
    assert [record.getMessage().count(missing) for record in caplog.records] == [1]


def test_a_payer_s_templates_leave_a_child_for_another_payer() -> None:
    workers = TemplateWorkers(2, max_seconds=60.0)
    begun, go = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go.wait(LIMIT_SECONDS)
        return AdapterTemplate(workers, ORDINARY, {}).render(HELLO)

    try:
        first = [workers.submit(work) for _ in range(3)]
        assert begun.wait(LIMIT_SECONDS)
        token = CLIENT.set("another")
        assert AdapterTemplate(workers, ORDINARY, {}).render(HELLO) == "user: hello\n"
        CLIENT.reset(token)
        go.set()
        assert [one.result(LIMIT_SECONDS) for one in first] == ["user: hello\n"] * 3
    finally:
        go.set()
        workers.close()


def test_a_child_that_is_killed_while_it_starts_is_no_fault_of_the_template(
    worker: TemplateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen: Any = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def start_and_kill_the_first(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_and_kill_the_first)
    assert AdapterTemplate(worker, ORDINARY, {}).render(HELLO) == "user: hello\n"
    assert len(started) == 2
