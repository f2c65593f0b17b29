"""Requests whose adapter's name moves while they run: what `on_new_version` makes of them, over HTTP."""

from __future__ import annotations

import base64
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, running_server, wait_for
from tests.support.http.uploads import parts_of
from tests.support.models.tiny_models import LINEAR_MODULES, make_adapter

NAME = "moved"
SAMPLING = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
ASKED = {"model": NAME, "prompt": [5, 6, 7], **SAMPLING, "return_token_ids": True}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "the"}], **SAMPLING, "return_token_ids": True}
GENERATE = {"model": NAME, "token_ids": [5, 6, 7], "sampling_params": SAMPLING}
Versions = list[tuple[int | None, str]]


@pytest.fixture(scope="module")
def contents(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three contents of one name; the last has another rank and other projections."""
    root, targets = tmp_path_factory.mktemp("moved"), LINEAR_MODULES["lfm2"]
    made = [make_adapter(checkpoints.base, root / f"{i}", rank=4, target_modules=targets, seed=20 + i) for i in (0, 1)]
    return [*made, make_adapter(checkpoints.base, root / "2", rank=8, target_modules=["q_proj", "w1"], seed=22)]


@pytest.fixture
def named(server: Server, contents: list[Path]) -> Iterator[list[str]]:
    """The digests of the contents; the name stands for the first."""
    digests = [put(server, directory)["digest"] for directory in (*contents[1:], contents[0])]
    yield [digests[-1], *digests[:-1]]
    server.http.post(f"{server.url}/resume")
    server.http.delete(f"{server.url}/v1/adapters/{NAME}")


def put(server: Server, directory: Path, query: str = "", **more: Any) -> dict[str, Any]:
    answer = server.http.put(f"{server.url}/v1/adapters/{NAME}{query}", files={**parts_of(directory), **more})
    assert answer.status_code in (200, 201), answer.text
    report: dict[str, Any] = answer.json()
    return report


def ask(server: Server, path: str = "/v1/completions", body: dict[str, Any] = ASKED, **more: Any) -> Any:
    answer = server.post(path, json={**body, **more})
    assert answer.status_code == 200, answer.text
    return answer


def tokens_of(answer: Any) -> list[int]:
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def versions_in(choices: list[dict[str, Any]]) -> Versions:
    return [(one["start"], one["digest"]) for choice in choices for one in choice.get("adapter_versions", [])]


@contextmanager
def paused(server: Server) -> Iterator[None]:
    assert server.post("/pause?mode=keep").status_code == 200
    yield
    assert server.post("/resume").status_code == 200


def streamed(server: Server, change: Callable[[], object], path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks; `change` happens between two of its tokens."""
    with server.http.stream("POST", server.url + path, json={**body, "stream": True}) as answer:
        chunks = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        before = [next(chunks) for _ in range(4)]
        with paused(server):
            change()
        return [choice for chunk in (*before, *chunks) for choice in chunk["choices"]]


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def num_requests(server: Server, what: str) -> float:
    """ "waiting" or "running", as the engine has told last: with each request that comes while it is paused."""
    return metric(server, f"multilora_num_requests_{what}")


def metric(server: Server, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def queued(server: Server, clients: ThreadPoolExecutor, *asked: dict[str, Any]) -> list[Future[Any]]:
    """Requests for whole answers, which wait in the paused engine."""
    futures = [clients.submit(ask, server, **fields) for fields in asked]
    num = sum(fields.get("n", 1) for fields in asked)
    wait_for(lambda: num_requests(server, "waiting") == num, "the requests")
    return futures


def moved(server: Server, clients: ThreadPoolExecutor, change: Callable[[], object], **fields: Any) -> Any:
    """A whole answer during which `change` happens: a stream that came later has had tokens by then."""
    with paused(server):
        (asked,) = queued(server, clients, {"max_tokens": 120, **fields})
    streamed(server, change, "/v1/completions", {**ASKED, "max_tokens": 8})
    return asked.result()


def test_a_name_has_a_setting_between_the_server_s_and_the_request_s(
    server: Server, contents: list[Path], named: list[str], clients: ThreadPoolExecutor
) -> None:
    shown = server.get(f"/v1/adapters/{NAME}").json()
    assert shown["on_new_version"] is None
    again = put(server, contents[0], "?on_new_version=continue")
    assert (again["version"], again["on_new_version"]) == (shown["version"], "continue")
    said = []
    for at, fields in ((1, {}), (0, {"on_new_version": "keep"}), (2, {})):
        answer = moved(server, clients, lambda at=at: put(server, contents[at]), **fields)
        said.append(answer.headers["x-multilora-adapter"].partition("sha256:")[2])
    assert said == [named[1], named[1], named[2]]
    (row,) = server.get(f"/v1/adapters?prefix={NAME}").json()["data"]
    assert (row["version"], row["on_new_version"]) == (shown["version"] + 3, "continue")
    put(server, contents[2], "?on_new_version=keep")
    answer = moved(server, clients, lambda: put(server, contents[0]))
    assert answer.headers["x-multilora-adapter"].endswith(named[2])
    wrong = server.http.put(f"{server.url}/v1/adapters/{NAME}?on_new_version=rest", files=parts_of(contents[0]))
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "on_new_version")


def test_a_name_that_restarts_its_requests_lets_streams_keep_their_version(
    server: Server, contents: list[Path], named: list[str], clients: ThreadPoolExecutor
) -> None:
    put(server, contents[0], "?on_new_version=restart")
    answer = moved(server, clients, lambda: put(server, contents[1]))
    fresh = ask(server, max_tokens=120)
    assert answer.headers["x-multilora-adapter"].endswith(named[1])
    assert tokens_of(answer) == tokens_of(fresh)
    chunks = streamed(server, lambda: put(server, contents[2]), "/v1/completions", {**ASKED, "max_tokens": 120})
    assert [token for chunk in chunks for token in chunk["token_ids"]] == tokens_of(fresh)
    put(server, contents[2], "?on_new_version=keep")


@pytest.fixture(scope="module")
def loading(
    checkpoints: Checkpoints, contents: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that loads the contents by their paths."""
    settings = {"model_name": BASE, "lora_path_root": contents[0].parent}
    with running_server(checkpoints.base, tmp_path_factory.mktemp("loading"), **settings) as running:
        yield running


def load(server: Server, way: str, directory: Path, setting: str | None) -> Any:
    """The answer to a load or a change of settings, whose body says what requests of the name do when it moves."""
    if way == "PATCH":
        return server.http.patch(f"{server.url}/v1/adapters/{NAME}", json={"on_new_version": setting})
    body: dict[str, Any] = {"lora_name": NAME, "on_new_version": setting}
    if way == "/load_lora_adapter_from_tensors":
        tensors = (directory / "adapter_model.safetensors").read_bytes()
        body["config_dict"] = json.loads((directory / "adapter_config.json").read_text())
        body["serialized_tensors"] = base64.b64encode(tensors).decode()
    else:
        body |= {"lora_path": str(directory), "load_inplace": True}
    return server.post(way, json=body)


@pytest.mark.parametrize(
    "way", ["/v1/load_lora_adapter", "/load_lora_adapter", "/load_lora_adapter_from_tensors", "PATCH"]
)
def test_each_way_to_load_sets_what_requests_do_when_the_name_moves(
    loading: Server, contents: list[Path], clients: ThreadPoolExecutor, way: str
) -> None:
    query, url = "?ephemeral=true" * way.endswith("tensors"), f"/v1/adapters/{NAME}"
    for setting, answering in (("continue", 1), ("restart", 1), ("keep", 0)):
        digests = [put(loading, contents[0], query)["digest"]]
        assert load(loading, way, contents[0], setting).status_code == 200
        assert loading.get(url).json()["on_new_version"] == setting
        with paused(loading):
            (asked,) = queued(loading, clients, {"max_tokens": 3})
            digests.append(put(loading, contents[1], query)["digest"])
        assert asked.result().headers["x-multilora-adapter"].endswith(digests[answering])
    wrong = load(loading, way, contents[0], "begin")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "on_new_version")
    assert "'keep', 'continue' or 'restart'" in wrong.json()["error"]["message"]
    unsaid = load(loading, way, contents[0], None)
    assert (unsaid.status_code, "`on_new_version`" in unsaid.text) == ((400, True) if way == "PATCH" else (200, False))
    assert loading.get(url).json()["on_new_version"] == "keep"
    assert loading.http.delete(loading.url + url).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASKED),
        ("/v1/completions", {**ASKED, "return_token_ids": None, "logprobs": 0}),
        ("/v1/completions", {**ASKED, "return_token_ids": None}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "return_token_ids": None}),
        ("/inference/v1/generate", GENERATE),
    ],
    ids=["completions", "with logprobs", "text alone", "chat", "chat in text", "generate"],
)
def test_a_stream_goes_on_with_the_new_version_and_says_from_which_token(
    server: Server, contents: list[Path], named: list[str], path: str, body: dict[str, Any]
) -> None:
    unmoved = ask(server, path, body)
    choices = streamed(server, lambda: put(server, contents[1]), path, {**body, "on_new_version": "continue"})
    (start, first), (moved_at, second) = versions_in(choices)
    assert (start, [first, second]) == (0, named[:2])
    assert moved_at is not None and 1 <= moved_at < 60
    if body.get("return_token_ids", path.startswith("/inference")):
        tokens = [token for choice in choices for token in choice.get("token_ids") or []]
        assert len(tokens) == 60
        assert tokens[:moved_at] == tokens_of(unmoved)[:moved_at]
        assert tokens != tokens_of(unmoved)


@pytest.mark.parametrize(("asks", "starts"), [("keep", 1), ("continue", 2), ("restart", 1), (None, 0)])
def test_a_whole_answer_tells_its_versions(
    server: Server, contents: list[Path], named: list[str], clients: ThreadPoolExecutor, asks: str | None, starts: int
) -> None:
    asking = {} if asks is None else {"on_new_version": asks}
    answer = moved(server, clients, lambda: put(server, contents[1]), **asking)
    versions, tokens = versions_in(answer.json()["choices"]), tokens_of(answer)
    answers = {digest: tokens_of(ask(server, model=f"{NAME}@{digest}", max_tokens=120)) for digest in named[:2]}
    last = named[0] if asks in ("keep", None) else named[1]
    assert answer.headers["X-Multilora-Adapter"].endswith(f"sha256:{last}")
    assert answer.json()["system_fingerprint"].endswith(last[:16])
    assert len(versions) == starts
    if asks == "continue":
        (_, first), (moved_at, second) = versions
        assert (first, second) == tuple(named[:2])
        assert tokens[:moved_at] == answers[first][:moved_at]
        assert tokens not in answers.values()
    else:
        assert tokens == answers[last]
        assert versions in ([], [(0, last)])


def test_every_choice_goes_on_by_itself(
    server: Server, contents: list[Path], named: list[str], clients: ThreadPoolExecutor
) -> None:
    asking = {"on_new_version": "continue", "n": 3, "temperature": 1.0, "seed": 1}
    answer = moved(server, clients, lambda: put(server, contents[2]), **asking)  # of another rank
    for choice in answer.json()["choices"]:
        assert [digest for _, digest in versions_in([choice])] == [named[0], named[2]]


def test_a_request_that_has_not_begun_has_the_newest_version(
    server: Server, contents: list[Path], named: list[str], clients: ThreadPoolExecutor
) -> None:
    with paused(server):
        asked = queued(server, clients, *({"on_new_version": what} for what in ("keep", "continue", "restart")))
        put(server, contents[1])
        put(server, contents[2])
    versions = [versions_in(one.result().json()["choices"]) for one in asked]
    assert versions == [[(0, named[0])], [(0, named[2])], [(0, named[2])]]


def test_a_rollback_moves_requests_and_a_deletion_does_not(server: Server, named: list[str]) -> None:
    def roll_back() -> None:
        body = {"version": named[1]}
        assert server.post(f"/v1/adapters/{NAME}/rollback", json=body).status_code == 200

    body = {**ASKED, "on_new_version": "continue"}
    assert [digest for _, digest in versions_in(streamed(server, roll_back, "/v1/completions", body))] == named[:2]
    url = f"{server.url}/v1/adapters/{NAME}"
    choices = streamed(server, lambda: server.http.delete(url), "/v1/completions", body)
    assert versions_in(choices) == [(0, named[1])]
    assert choices[-1]["finish_reason"] == "length"


def test_a_version_asked_for_by_number_is_kept(server: Server, contents: list[Path], named: list[str]) -> None:
    body = {**ASKED, "model": f"{NAME}@{named[0]}", "on_new_version": "continue"}
    assert versions_in(streamed(server, lambda: put(server, contents[1]), "/v1/completions", body)) == [(0, named[0])]


def test_what_a_running_request_cannot_take_over_is_told(
    server: Server, contents: list[Path], named: list[str]
) -> None:
    template = {"chat_template": ("chat_template.jinja", b"{{ messages[0].content }}!")}
    body = {**ASKED, "on_new_version": "continue"}
    choices = streamed(server, lambda: put(server, contents[1], **template), "/v1/completions", body)
    first, refused = (one for choice in choices for one in choice.get("adapter_versions", []))
    assert (first["start"], first["digest"]) == (0, named[0])
    assert refused["start"] is None
    assert refused["reason"] == "Its chat templates are others; send the request again."


@pytest.mark.usefixtures("named")
def test_what_makes_no_sense_is_refused(server: Server) -> None:
    refused = server.post("/v1/completions", json={**ASKED, "on_new_version": "restart", "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "on_new_version")
    assert "leave out `stream`" in refused.json()["error"]["message"]
    refused = server.post("/inference/v1/generate", json={**GENERATE, "on_new_version": "restart", "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "on_new_version")
    inner = {**GENERATE, "sampling_params": {**SAMPLING, "on_new_version": "keep"}}
    for path, body in (
        ("/v1/completions", {**ASKED, "on_new_version": "newest"}),
        ("/v1/completions", {**ASKED, "on_new_version": 1}),
        ("/inference/v1/generate", inner),
        ("/v1/responses", {"model": NAME, "input": "the", "on_new_version": "keep"}),
    ):
        assert server.post(path, json=body).status_code == 400
    base = ask(server, model=BASE, on_new_version="continue", max_tokens=3)
    assert "adapter_versions" not in base.json()["choices"][0]


@pytest.mark.wide
def test_200_moves_at_64_running_requests(
    checkpoints: Checkpoints, contents: list[Path], tmp_path: Path, clients: ThreadPoolExecutor
) -> None:
    """With the server's setting, and requests that say nothing or say how versions are to be told."""
    settings = {"model_name": BASE, "on_new_version": "continue", "max_ephemeral_bytes": "8MiB"}
    with running_server(checkpoints.endless_base, tmp_path, **settings) as server:
        put(server, contents[0], "?ephemeral=true")
        is_over = threading.Event()

        def client(number: int) -> list[Versions]:
            fields: dict[str, Any] = {"n": 8, "temperature": 1.0, "seed": number, "max_tokens": 200 + 10 * number}
            found = []
            while not is_over.is_set():
                asks = {"on_new_version": "continue"} if number % 2 else {}
                choices = ask(server, **fields, **asks).json()["choices"]
                assert all(len(choice["token_ids"]) == fields["max_tokens"] for choice in choices)
                found += [versions_in([choice]) for choice in choices]
            return found

        running = [clients.submit(client, number) for number in range(8)]
        wait_for(lambda: num_requests(server, "running") >= 64, "64 sequences")
        digests = [put(server, contents[i % 3], "?ephemeral=true")["digest"] for i in range(1, 201)]
        is_over.set()
        found = [versions for one in running for versions in one.result()]
        assert len(set(itertools.chain(*found))) > 64
        for versions in filter(None, found):
            starts = [start for start, _ in versions]
            assert starts[0] == 0
            assert starts == sorted(set(starts), key=int)
            assert {digest for _, digest in versions} <= set(digests)
        wait_for(lambda: num_requests(server, "running") == 0, "the end")
        listed = server.get("/v1/adapters").json()["data"]
        assert [one["digest"] for one in listed] == digests[-1:]


@pytest.mark.wide
def test_300_ephemeral_versions_leave_nothing(checkpoints: Checkpoints, contents: list[Path], tmp_path: Path) -> None:
    """Each of another content and used once, beside a request that goes on with all of them."""
    settings = {"model_name": BASE, "on_new_version": "continue", "max_ephemeral_bytes": "8MiB"}
    with running_server(checkpoints.endless_base, tmp_path, **settings) as server:

        def upload(number: int) -> None:
            parts = parts_of(contents[0])
            name, config = parts["adapter_config"]
            changed = json.loads(config) | {"lora_alpha": number + 1}
            parts["adapter_config"] = (name, json.dumps(changed).encode())
            answer = server.http.put(f"{server.url}/v1/adapters/{NAME}?ephemeral=true", files=parts)
            assert answer.status_code == 201, answer.text
            ask(server, max_tokens=1)

        def held() -> tuple[int, int, float]:
            """Open files of both processes, and their memory in MB; contents in the store."""
            pids = (server.process.pid, *server.engine_pids())
            files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
            lines = [Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids]
            pss = sum(int(line.split()[1]) for some in lines for line in some if line.startswith("Pss:")) >> 10
            return files, pss, metric(server, "multilora_adapters_on_disk")

        upload(0)
        body = {**ASKED, "max_tokens": 15_000, "stream": True, "on_new_version": "continue"}
        with server.http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            for number in range(1, 60):
                upload(number)
            before = held()
            for number in range(60, 300):
                upload(number)
            after = held()
            answer.close()
        assert after[0] <= before[0] + 8
        assert after[1] <= before[1] + 32, (before, after)
        assert after[2] <= 8
        assert len(server.get("/v1/adapters").json()["data"]) == 1
