"""The life of the processes: lean imports, refusals to start, disconnects, a killed engine, SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

from service.api.adapter_routes.adapters import require_open_store
from service.api.errors import NotReady
from service.cli.main import main
from service.server.app import create_app
from service.server.serve import listen, make_server, serve
from service.settings import Settings
from service.start_check import StartError
from service.text.template_worker import NUM_WORKERS
from tests.api.conftest import ADAPTERS, BASE, ENDLESS, Checkpoints
from tests.support.http.server import (
    Server,
    posted,
    running_server,
    standing_still,
    start_server,
    still_loading,
    wait_for,
)
from tests.support.http.uploads import MULTIPART, multipart, parts_of, upload
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import make_adapter

ROOT = Path(__file__).resolve().parents[3]
SHORT: dict[str, Any] = {**ENDLESS, "max_tokens": 2}
TEMPLATE_WORKER = "service.text.template_worker"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


class TestLeanProcess:
    def test_the_api_imports_neither_torch_nor_transformers(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        code = f"""
import sys
from pathlib import Path
from service.server.app import finish_start, create_app
from service.settings import load_settings
app = create_app(load_settings(model_dir=Path({str(checkpoints.base)!r}), store_dir=Path({str(tmp_path)!r})))
app.openapi()
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "numpy", "transformers", "peft", "triton"}}))
"""
        done = run_python(code)
        assert done.stdout.strip() == "[]", done.stderr

    def test_nor_does_the_process_that_has_served(self, server: Server) -> None:
        assert server.post("/v1/completions", json={**SHORT, "guided_choice": ["a"]}).status_code == 200
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "llguidance" not in maps
        assert all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in server.engine_pids())

    def test_a_server_that_is_ready_imports_nothing_for_its_first_stream_and_upload(
        self, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would be done on the event loop, or with Python's lock, and hold up everybody's tokens."""
        monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        with running_server(checkpoints.base, tmp_path) as server:
            wait_for(lambda: server.get("/ready").status_code == 200, "the server to be ready")
            base, num_before = server.get("/v1/models").json()["data"][0]["id"], len(server.log)
            answer = server.post("/v1/completions", json={**SHORT, "model": base, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
            upload(server, "a", checkpoints.spare).raise_for_status()
            imported = re.findall(r"^import time:.*\| +(\S+)$", server.log[num_before:], re.MULTILINE)
        assert {name.partition(".")[0] for name in imported} <= {"encodings"}  # by json, of the standard library


class TestRefusalToStart:
    """Faults that are found before the engine starts need no process of their own."""

    @pytest.fixture
    def refused(self, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
        """The last line of a start with these flags, which ends with code 1 and without a traceback."""

        def serve(*flags: str) -> str:
            capfd.readouterr()
            assert main(["serve", "--port=0", *flags]) == 1
            err = capfd.readouterr().err
            assert "Traceback" not in err
            return err.splitlines()[-1]

        return serve

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--port=high"], "--port"),
            (["--token-budget=1", "--max-sequences=2"], "token_budget"),
            (["--model-dir=/nowhere"], "config.json"),
            (["--kv-bytes=much"], "--kv-bytes"),
            (["--api-keys=a\x07"], "printable"),
        ],
    )
    def test_wrong_settings_are_one_sentence(
        self, refused: Callable[..., str], flags: list[str], words: str, tmp_path: Path
    ) -> None:
        line = refused(f"--store-dir={tmp_path}", *flags)
        assert line.startswith("multilora: ")
        assert words in line

    def test_an_unknown_model_type_is_named(
        self, refused: Callable[..., str], checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        config = json.loads((checkpoints.base / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba9"}))
        assert "mamba9" in refused(f"--model-dir={tmp_path}", f"--store-dir={tmp_path}")

    def test_what_the_engine_cannot_do_with_is_one_sentence(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        """It is the engine process that finds out, and its log goes where the server's does."""
        from safetensors.numpy import load_file, save_file

        lacking = shutil.copytree(checkpoints.base, tmp_path / "lacking")
        tensors = load_file(lacking / "model.safetensors")
        missing = next(name for name in tensors if "out_proj" in name)
        del tensors[missing]
        save_file(tensors, lacking / "model.safetensors")
        model = f"--model-dir={checkpoints.base}"
        starts = {
            missing.removesuffix(".weight"): f"--model-dir={lacking}",
            "bytes; raise --kv-bytes.": f"{model} --kv-bytes=1",
            "cuda:99": f"{model} --device=cuda:99",
        }
        code = f"""
import sys
from service.cli.main import main
for flags in {list(starts.values())!r}:
    assert main(["serve", "--port=0", {f"--store-dir={tmp_path / 'store'}"!r}, *flags.split()]) == 1
    print("----", file=sys.stderr, flush=True)
"""
        done = run_python(code)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        said = done.stderr.split("----\n")[:-1]
        for words, one in zip(starts, said, strict=True):
            assert words in one.splitlines()[-1]

    def test_a_store_that_cannot_be_opened_is_named(
        self, refused: Callable[..., str], checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        for store in ("file", "file/below"):
            line = refused(f"--model-dir={checkpoints.base}", f"--store-dir={tmp_path / store}")
            assert line.startswith(f"multilora: The adapter store {tmp_path / store} cannot")
            assert "--store-dir" in line

    def test_a_file_of_the_model_that_cannot_be_read_is_named(
        self, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        def refuse(_settings: Settings, _engine: object) -> None:
            raise PermissionError(13, "Permission denied", "/models/base/config.json")

        monkeypatch.setattr("service.server.app.create_app", refuse)
        assert serve(["--port=0", f"--model-dir={checkpoints.base}", f"--store-dir={tmp_path}"]) == 1
        assert "multilora: /models/base/config.json cannot be used: Permission denied." in capsys.readouterr().err

    def test_a_chat_template_that_is_not_utf_8_is_named(
        self, refused: Callable[..., str], checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        for source in checkpoints.base.iterdir():
            (tmp_path / source.name).write_bytes(source.read_bytes())
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
        line = refused(f"--model-dir={tmp_path}", f"--store-dir={tmp_path / 'store'}")
        assert line.startswith("multilora: chat_template.jinja of the model is not UTF-8")

    def test_an_adapter_of_the_base_s_new_name_is_named(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        """It was stored while the base had another name; requests could not reach it now."""

        def app(name: str) -> Any:
            return create_app(Settings(model_dir=checkpoints.base, store_dir=tmp_path, model_name=name))

        store = app("before").state.services.store
        with store.begin() as upload:
            upload.add_directory(checkpoints.spare)
            upload.finish("support")
        store.close()
        with pytest.raises(StartError, match=r"an adapter named 'support'.*--model-name.*multilora rm support"):
            app("support")
        app("before").state.services.store.close()  # the refused one has left no lock

    def test_another_package_called_kernels_is_refused(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("")
        flags = ["--port=0", f"--model-dir={checkpoints.base}", f"--store-dir={tmp_path}"]
        prelude = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
        done = run_python(f"{prelude}\nfrom service.cli.main import main\nsys.exit(main(['serve', *{flags!r}]))")
        assert done.returncode == 1
        assert "pip uninstall kernels" in done.stderr

    def test_a_taken_port_and_a_taken_store_are_named(
        self, refused: Callable[..., str], server: Server, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        port, model = server.url.rsplit(":", 1)[1], f"--model-dir={checkpoints.base}"
        assert f"port {port}" in refused(f"--port={port}", model, f"--store-dir={tmp_path}")
        assert refused(model, f"--store-dir={server.store_dir}").startswith("multilora: ")


@pytest.fixture(scope="module")
def endless(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the base that ENDLESS fits."""
    settings = {"model_name": BASE, "preload_adapters_dir": checkpoints.adapters, "log_format": "json"}
    with running_server(checkpoints.endless_base, tmp_path_factory.mktemp("endless"), **settings) as running:
        yield running


def test_accepted_connections_send_at_once() -> None:
    """As a loop gets them from the server's own listening socket: nothing else sets the option."""

    async def nodelay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            option = await found
            writer.close()
        return option

    assert asyncio.run(nodelay()) == 1


def start_template_workers(server: Server, chat: dict[str, Any]) -> None:
    """Have every thread that renders adapters' templates start its process, of which there is one at least: while that
    stands still, it is another one that answers a chat. One client has one thread, so two of them ask."""

    def ask(address: str) -> None:
        with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=LIMIT_SECONDS) as http:
            http.post(f"{server.url}/v1/chat/completions", json=chat).raise_for_status()

    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        while len(pids := server.child_pids_of(TEMPLATE_WORKER)) < NUM_WORKERS:
            with standing_still(*pids):
                asked = [pool.submit(ask, f"127.0.0.{2 + number}") for number in range(NUM_WORKERS)]
                wait(asked, LIMIT_SECONDS, FIRST_COMPLETED)
            for one in asked:
                one.result()


class TestDisconnect:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {**ENDLESS, "stream": True}),
            ("/v1/completions", ENDLESS),
            ("/v1/completions", {**ENDLESS, "n": 3, "stream": True}),
            (
                "/v1/chat/completions",
                {"model": "beta", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True},
            ),
            ("/v1/completions/batch", {"items": [ENDLESS, {**ENDLESS, "model": BASE}]}),
        ],
        ids=["stream", "whole", "choices", "chat", "batch"],
    )
    def test_a_client_that_goes_frees_everything(self, endless: Server, path: str, body: dict[str, Any]) -> None:
        aborted = endless.metric("requests_total", outcome="abort")
        name = f"gone-{uuid4().hex}"
        with posted(endless, path, body, name):
            wait_for(lambda: endless.metric("num_requests_running") > 0, "the request to run")
        wait_for(lambda: endless.metric("requests_total", outcome="abort") > aborted, "the request to be aborted")
        wait_for(lambda: endless.metric("num_requests_running") == 0, "the engine to forget the request")
        for metric in ("num_requests_open", "num_requests_waiting", "kv_blocks_used", "state_lines_used"):
            assert endless.metric(metric) == 0
        (line,) = wait_for(lambda: endless.log_lines(name), "the log line")
        assert (line["status"], line["ended"]) == (200 if body.get("stream") else 499, "abort")

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions/batch"])
    def test_a_client_that_goes_ends_its_admission(self, server: Server, checkpoints: Checkpoints, path: str) -> None:
        files = {**parts_of(checkpoints.spare), "chat_template": ("chat_template.jinja", b"{{ messages }}")}
        server.post("/v1/adapters", data={"name": "speaker"}, files=files).raise_for_status()

        def num_gone() -> float:
            return server.metric("http_requests_total", route=path, status="499")

        gone = num_gone()
        chat = {"model": "speaker", "messages": [{"role": "user", "content": "x"}] * 2, "max_tokens": 1}
        start_template_workers(server, chat)
        with standing_still(*server.child_pids_of(TEMPLATE_WORKER)):  # who admits it waits for the text
            with posted(server, path, chat if path.endswith("completions") else {"items": [chat]}):
                wait_for(lambda: server.metric("num_requests_open") > 0, "the request to take its place")
            wait_for(lambda: num_gone() == gone + 1, "the request to end")
            assert server.metric("num_requests_open") == 0
        server.http.delete(f"{server.url}/v1/adapters/speaker").raise_for_status()


class TestKilledEngine:
    def test_requests_end_with_an_error_and_the_server_is_ready_again(
        self, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        with running_server(
            checkpoints.endless_base,
            tmp_path,
            model_name=BASE,
            preload_adapters_dir=checkpoints.adapters,
            log_format="json",
            replicas=1,
        ) as server:
            whole: list[httpx.Response] = []
            thread = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", json=ENDLESS)))
            response = {"model": "alpha", "input": "the", "ignore_eos": True, "max_output_tokens": 15_000}
            said = [{"role": "user", "content": "the"}]
            message = {"model": "alpha", "messages": said, "ignore_eos": True, "max_tokens": 15_000}
            with (
                httpx.stream(
                    "POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=LIMIT_SECONDS
                ) as stream,
                httpx.stream(
                    "POST", f"{server.url}/v1/responses", json={**response, "stream": True}, timeout=LIMIT_SECONDS
                ) as response_stream,
                httpx.stream(
                    "POST", f"{server.url}/v1/messages", json={**message, "stream": True}, timeout=LIMIT_SECONDS
                ) as message_stream,
            ):
                lines = stream.iter_lines()
                assert '"text"' in next(lines)
                thread.start()
                wait_for(lambda: server.metric("num_requests_open") == 4, "all requests to run")
                os.kill(server.engine_pid(), signal.SIGKILL)
                rest = [line for line in lines if line]
                events, message_events = (
                    [json.loads(line[6:]) for line in one.iter_lines() if line.startswith("data: ")]
                    for one in (response_stream, message_stream)
                )
            thread.join()
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert (events[-1]["type"], events[-1]["error"]["code"]) == ("error", "engine_failed")
            assert "signal 9" in events[-1]["message"] == events[-1]["error"]["message"]
            last = message_events[-1]
            assert (last["type"], last["error"]["type"]) == ("error", "api_error")
            assert last["request_id"] == message_stream.headers["request-id"]
            assert "signal 9" in last["error"]["message"]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_failed"
            assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (500, "engine_failed")
            assert "signal 9" in whole[0].json()["error"]["message"]
            (line,) = wait_for(lambda: server.log_lines(stream.headers["x-request-id"]), "the stream's log line")
            assert (line["status"], line["ended"], "signal 9" in line["error"]) == (200, "error", True)
            assert server.get("/health").status_code == 200
            refused = server.post("/v1/completions", json=SHORT)
            assert refused.status_code in (200, 503)
            wait_for(lambda: server.get("/ready").status_code == 200, "the engine to be back")
            assert {card["id"] for card in server.get("/v1/models").json()["data"]} == {BASE, *ADAPTERS}
            for name in ADAPTERS:
                assert server.post("/v1/completions", json={**SHORT, "model": name}).status_code == 200
            assert server.metric("engine_restarts_total") == 1
            self.dies_for_good(server)

    def dies_for_good(self, server: Server) -> None:
        """Killed as soon as it is there again, until it stays down: twice more, or thrice where the first death is no
        longer counted, since the next start took a minute."""
        while server.get("/health").status_code == 200:
            for child in server.child_pids():
                with contextlib.suppress(ProcessLookupError):  # the one that was killed before
                    os.kill(child, signal.SIGKILL)
        message = server.get("/health").json()["error"]["message"]
        assert "died 3 times" in message
        assert message.count("\n") == 0
        answer = server.post("/v1/completions", json=SHORT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert server.metric("engine_restarts_total") in (2, 3)
        gauges = ("num_requests_running", "num_requests_waiting", "kv_blocks_used", "adapter_rows_used")
        assert [server.metric(name) for name in gauges] == [0] * len(gauges)
        assert [server.metric("adapters", tier=tier) for tier in ("device", "host", "store")] == [0, 0, len(ADAPTERS)]
        assert {one["state"] for one in server.get("/v1/adapters").json()["data"]} == {"disk"}


class TestAdaptersThatDoNotFit:
    def test_none_is_taken_before_the_rows_are_known_and_a_stored_one_is_the_clients_fault(
        self, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        big = make_adapter(checkpoints.base, tmp_path / "big", rank=64, target_modules="all-linear", seed=3)
        settings: dict[str, Any] = {"model_name": BASE, "lora_path_root": tmp_path}
        body = {"lora_name": "early", "lora_path": "big"}
        with running_server(checkpoints.base, tmp_path, **settings, wait=False) as server:
            with still_loading(server):
                early = [upload(server, "early", big), server.post("/v1/load_lora_adapter", json=body)]
            assert [(one.status_code, one.json()["error"]["code"]) for one in early] == [(503, "not_ready")] * 2
            wait_for(lambda: server.get("/ready").status_code == 200, "the server to be ready")
            assert upload(server, "big", big).status_code == 201
            assert server.stop() == 0
        with running_server(checkpoints.base, tmp_path, **settings, adapter_row_bytes=300_000) as server:
            answer = server.post("/v1/completions", json={**SHORT, "model": "big"})
            assert answer.status_code == 400, answer.text
            assert re.search(r"needs \d+ \w+ rows.*\(\d+ bytes\).*holds \d+ \(\d+ bytes\)", answer.text)
            assert server.post("/v1/completions", json={**SHORT, "model": BASE}).status_code == 200


class TestSigterm:
    def test_one_that_comes_before_the_loop_ends_the_server(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        """uvicorn catches signals before the application's lifespan begins."""
        settings = Settings(model_dir=checkpoints.base, store_dir=tmp_path, model_name=BASE)
        server = make_server(create_app(settings), settings)
        server.handle_exit(signal.SIGTERM, None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            thread.join(LIMIT_SECONDS)
            ended = not thread.is_alive()
            server.force_exit = server.should_exit = True
            thread.join(LIMIT_SECONDS)
        assert ended
        assert server.started

    def test_ctrl_c_while_the_server_starts_is_no_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(_given: list[str]) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("service.cli.main._serve", interrupted)
        assert main(["serve"]) == 130

    def test_a_server_that_shuts_down_takes_no_adapters(self) -> None:
        services: Any = SimpleNamespace(store=object(), draining=True)
        with pytest.raises(NotReady, match="shutting down"):
            require_open_store(services)

    @pytest.mark.parametrize("limit_seconds", [300.0, 0.0])
    def test_uploads_are_waited_for_up_to_the_limit(
        self, checkpoints: Checkpoints, tmp_path: Path, limit_seconds: float
    ) -> None:
        settings = Settings(model_dir=checkpoints.base, store_dir=tmp_path)
        app = create_app(settings)
        server = make_server(app, settings)

        async def drain() -> None:
            """The engine has nothing to do, as it was never started."""
            with app.state.services.uploading():
                draining = asyncio.create_task(server.drain(limit_seconds))
                if not limit_seconds:
                    await draining
                for _ in range(10):
                    await asyncio.sleep(0)
                assert server.should_exit == (limit_seconds == 0)
            await draining

        asyncio.run(drain())
        assert server.should_exit
        app.state.services.store.close()

    def test_what_is_on_its_way_finishes_and_the_rest_is_refused(
        self, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        """An upload and a stream."""
        parts = [(f'name="{part}"', content) for part, (_, content) in parts_of(checkpoints.spare).items()]
        body = multipart([('name="name"', b"late"), *parts])
        settings: dict[str, Any] = {"model_name": BASE, "preload_adapters_dir": checkpoints.adapters}
        server = start_server(checkpoints.base, tmp_path, shutdown_limit_seconds=300, **settings)
        on_its_way, draining = threading.Event(), threading.Event()

        def chunks() -> Iterator[bytes]:
            yield body[:-1000]
            on_its_way.set()
            assert draining.wait(LIMIT_SECONDS)
            yield body[-1000:]

        def send(answers: list[httpx.Response]) -> None:
            answers.append(server.post("/v1/adapters", content=chunks(), headers=MULTIPART))

        answers: list[httpx.Response] = []
        thread = threading.Thread(target=send, args=(answers,))
        try:
            thread.start()
            assert on_its_way.wait(LIMIT_SECONDS)
            wait_for(lambda: list((tmp_path / "store").glob("*/staging/*")), "the upload to begin")
            client = openai.OpenAI(base_url=server.openai_url, api_key="unused", max_retries=0, timeout=LIMIT_SECONDS)
            stream = client.completions.create(
                model="alpha", prompt="the", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            with standing_still(*server.engine_pids()):
                server.process.send_signal(signal.SIGTERM)
                wait_for(lambda: server.get("/ready").status_code == 503, "/ready to turn")
                refused = server.post("/v1/completions", json=SHORT)
                assert (refused.status_code, "shutting down" in refused.text) == (503, True)
                assert refused.headers["Retry-After"]
            assert list(stream)[-1].choices[0].finish_reason == "length"
            wait_for(lambda: server.get("/health").json()["engine"] == "down", "the engine to have nothing to do")
            draining.set()
            thread.join(LIMIT_SECONDS)
            assert answers[0].status_code == 201, answers[0].text
            assert server.process.wait(LIMIT_SECONDS) == 0
        finally:
            draining.set()
            server.process.kill()
            thread.join(LIMIT_SECONDS)
        again = start_server(checkpoints.base, tmp_path, model_name=BASE, wait=False)
        try:
            with still_loading(again):
                assert {card["id"] for card in again.get("/v1/models").json()["data"]} == {BASE, *ADAPTERS, "late"}
                assert again.get("/ready").status_code == 503
                assert again.get("/health").status_code == 200
            assert again.stop() == 0
        finally:
            again.process.kill()

    def test_what_does_not_finish_in_time_is_told(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        server = start_server(checkpoints.endless_base, tmp_path, model_name=BASE, shutdown_limit_seconds=0)
        try:
            body = {**ENDLESS, "model": BASE, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LIMIT_SECONDS) as stream:
                lines = stream.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "not_ready"
            assert server.process.wait(LIMIT_SECONDS) == 0
        finally:
            server.process.kill()

    def test_after_a_second_one_nothing_is_waited_for(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        """A stream is told that it ends, and so is an upload that does not come; the server ends as after one."""
        server = start_server(checkpoints.endless_base, tmp_path, model_name=BASE, shutdown_limit_seconds=300)
        try:
            address = httpx.URL(server.url)
            stalled = socket.create_connection((address.host, address.port or 0), LIMIT_SECONDS)
            with (
                stalled,
                httpx.stream(
                    "POST",
                    f"{server.url}/v1/completions",
                    json={**ENDLESS, "model": BASE, "stream": True},
                    timeout=LIMIT_SECONDS,
                ) as stream,
            ):
                lines = stream.iter_lines()
                next(lines)
                head = f"Host: it\r\nContent-Type: {MULTIPART['Content-Type']}\r\nContent-Length: 1000\r\n\r\n"
                stalled.sendall(f"PUT /v1/adapters/late HTTP/1.1\r\n{head}".encode())
                wait_for(lambda: list(server.store_dir.glob("*/staging/*")), "the upload to begin")
                server.process.send_signal(signal.SIGINT)
                wait_for(lambda: server.get("/ready").status_code == 503, "/ready to turn")
                server.process.send_signal(signal.SIGINT)
                rest = [line for line in lines if line]
                refused = stalled.recv(4096)
            assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "not_ready"
            assert refused.startswith(b"HTTP/1.1 503") and b"shut down; send the request to another" in refused, refused
            assert server.process.wait(LIMIT_SECONDS) == 0
            assert "Traceback" not in server.log, server.log
        finally:
            server.process.kill()
