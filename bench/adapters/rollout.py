"""Times of a trainer's step over HTTP: uploads of versions, moves beside running requests, and pauses.

    .venv/bin/python -m bench.adapters.rollout [--device cuda] [--shape 8b] [--rank 16] [--moves 200] [--rounds 3]
                                               [--requests 64] [--output-tokens 512] [--json FILE]
    .venv/bin/python -m bench.adapters.rollout --versions 10000
    .venv/bin/python -m bench.adapters.rollout --replicas 8 [--rank 16]
    .venv/bin/python -m bench.adapters.rollout --replicas 8 [--rank 16]

A server serves one name, whose versions are ephemeral and stand on every projection. Bodies are written before the
clock starts. A shape other than the bundled model is written to a temporary directory first: 16 GB for 8b.

    by_file, by_tensors  from the first byte of a new version to the 201, and to the first token that it has made
    moves   tokens per second of --requests sequences that `continue` while the name moves --moves times, of those
            while it does not; both in each round, forth and back. The versions are uploaded once; moves are rollbacks.
            Not measured with --moves 0
    pause   from /pause to its answer, and from /resume to the next token, with all sequences running; and a step

With --versions alone, so many small ones of one name, by file and by tensors in turn, each asked for a token, beside
requests that `continue`: what both processes hold after each tenth of them.

With --replicas alone, a second server has so many engines: `by_file` and `by_tensors` as above, in times of those of
the server with one engine, to which the same is sent before and after.
"""

from __future__ import annotations

import base64
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from bench.adapters.upload_speed import send
from bench.arguments import facts_of, load_of, parser_of
from bench.rounds import forth_and_back
from bench.shapes import BUNDLED, SHAPES, write_checkpoint
from tests.support.http.server_process import Server, running_server, wait_for
from tests.support.peft_files import adapter_files

NAME = "policy"
_UPLOADS = 7
# What is told of memory.
_HELD = (
    "multilora_adapters{",
    "multilora_adapters_on_disk",
    "multilora_adapter_rows_used",
    "multilora_adapter_tier_bytes",
)
_CHOICES = 8  # of one prompt, as in a rollout


class Subject:
    """A server whose name has had a version, and the bodies of others; of whole adapters, or of two small modules."""

    def __init__(self, server: Server, model_dir: Path, rank: int, *, are_whole: bool = True) -> None:
        self._server, self._model_dir, self._rank, self._seed = server, model_dir, rank, 0
        self._are_whole = are_whole
        self.http = httpx.Client(base_url=server.url, timeout=None)
        self.digests: list[str] = []
        self.take_two()

    def take_two(self) -> None:
        """Upload the versions that `move` goes between; others may have pushed them out."""
        self.digests = [self.put(self.file_body())["digest"] for _ in range(2)]

    def _files(self) -> list[tuple[str, tuple[str, bytes]]]:
        self._seed += 1
        kind: dict[str, Any] = {"is_whole": self._are_whole, "model_dir": self._model_dir, "dtype": "<f2"}
        return adapter_files(self._seed, self._rank, **kind)

    def file_body(self) -> httpx.Request:
        """A PUT, whose body has been written."""
        url = f"/v1/adapters/{NAME}?ephemeral=true"
        request = self.http.build_request("PUT", url, files=self._files())
        request.read()
        return request

    def tensors_body(self) -> httpx.Request:
        """SGLang's call, whose body has been written."""
        (_, (_, config)), (_, (_, tensors)) = self._files()
        body = {"lora_name": NAME, "config_dict": json.loads(config)}
        body["serialized_tensors"] = base64.b64encode(tensors).decode()
        return self.http.build_request("POST", "/load_lora_adapter_from_tensors", json=body)

    def put(self, request: httpx.Request) -> Any:
        kind = request.headers["content-type"]
        return json.loads(send(str(request.url), request.method, request.content, kind))

    def ask(self, **fields: Any) -> Any:
        body = {"model": NAME, "prompt": [5, 6, 7], "ignore_eos": True, **fields}
        answer = self.http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return answer.json()

    def upload_ms(self, request: httpx.Request) -> tuple[float, float]:
        """To the answer, and to the first token."""
        begin = time.perf_counter()
        self.put(request)
        answered = time.perf_counter()
        self.ask(max_tokens=1)
        return (answered - begin) * 1e3, (time.perf_counter() - begin) * 1e3

    def held(self) -> dict[str, Any]:
        """Resident MB and open files of the processes, and what the store and the engine hold."""
        told: dict[str, Any] = {}
        pids = {"api": self._server.process.pid, "engine": self._server.engine_pids()[0]}
        for name, pid in pids.items():
            told[f"{name}_mb"] = round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6, 1)
            told[f"{name}_open_files"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        told["files_in_store"] = sum(path.is_file() for path in self._server.store_dir.rglob("*"))
        told["names"] = len(self.http.get("/v1/adapters").json()["data"])
        told["versions"] = len(self.http.get(f"/v1/adapters/{NAME}/history").json()["data"])
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(_HELD):
                told[line.rpartition(" ")[0].removeprefix("multilora_")] = float(line.rpartition(" ")[2])
        return told

    def told_by_server(self) -> str:
        """Why a connection may have ended."""
        return f"The server's exit code is {self._server.process.poll()}; its log ends:\n{self._server.log[-2000:]}"

    def move(self, number: int) -> None:
        answer = self.http.post(
            f"/v1/adapters/{NAME}/rollback", json={"version": self.digests[number % len(self.digests)]}
        )
        answer.raise_for_status()

    @contextmanager
    def running(self, num_requests: int, num_tokens: int) -> Iterator[list[Any]]:
        """The answers, there after the block, of so many sequences, each with the time of its end."""

        def timed(**fields: Any) -> tuple[Any, float]:
            return self.ask(**fields), time.perf_counter()

        with ThreadPoolExecutor(num_requests) as pool:
            fields = {"max_tokens": num_tokens, "n": min(_CHOICES, num_requests), "on_new_version": "continue"}
            num = max(num_requests // _CHOICES, 1)
            asked = [pool.submit(timed, **fields, temperature=1.0, seed=seed) for seed in range(num)]
            answers: list[Any] = []
            yield answers
            answers += [one.result() for one in asked]


def uploads(subject: Subject) -> dict[str, Any]:
    """Medians; the first of each is not counted."""
    told: dict[str, Any] = {}
    for name, body in (("by_file", subject.file_body), ("by_tensors", subject.tensors_body)):
        times = [subject.upload_ms(body()) for _ in range(_UPLOADS + 1)][1:]
        told[name] = {
            "answer_ms": statistics.median(answer for answer, _ in times),
            "first_token_ms": statistics.median(token for _, token in times),
        }
    return told


def beside_one(one: Subject, many: Subject) -> dict[str, Any]:
    """Medians of the ratios of `many` engines to `one`; the first round is not counted."""
    told: dict[str, Any] = {}
    for name, body in (("by_file", Subject.file_body), ("by_tensors", Subject.tensors_body)):
        ratios = []
        for _ in range(_UPLOADS + 1):
            before, between, after = (side.upload_ms(body(side)) for side in (one, many, one))
            ratios.append(
                [2 * middle / (first + last) for first, middle, last in zip(before, between, after, strict=True)]
            )
        answer, token = (statistics.median(some) for some in zip(*ratios[1:], strict=True))
        told[name] = {"answer": answer, "first_token": token}
    return told


def moves(subject: Subject, num_requests: int, num_tokens: int, num_moves: int, num_rounds: int) -> dict[str, Any]:
    """The ratio of tokens per second, its parts, and the versions of an answer."""
    subject.take_two()
    ratios, seconds_of, versions = [], {"still": 0.0, "moved": 0.0}, []
    for number in range(num_rounds + 1):
        seconds: dict[str, list[float]] = {"still": [], "moved": []}
        for side in forth_and_back(seconds):
            begin = time.perf_counter()
            with subject.running(num_requests, num_tokens) as answers:
                if side == "moved":
                    # Spread over what the still side took; the last ones may come behind the end.
                    pause = (seconds_of["still"] or 1.0) / num_moves
                    for move in range(num_moves):
                        subject.move(move)
                        threading.Event().wait(max(0.0, begin + (move + 1) * pause - time.perf_counter()))
            seconds[side].append(max(end for _, end in answers) - begin)
            choices = [choice for answer, _ in answers for choice in answer["choices"]]
            assert all(choice["finish_reason"] == "length" for choice in choices), "a request has failed"
            if side == "moved":
                versions += [len(choice["adapter_versions"]) for choice in choices]
        seconds_of = {side: statistics.mean(some) for side, some in seconds.items()}
        if number:  # the first one warms
            ratios.append(seconds_of["still"] / seconds_of["moved"])
    num = num_requests * num_tokens
    return {
        "tokens_per_second_of_still": statistics.median(ratios),
        "tokens_per_second": num / seconds_of["moved"],
        "versions_of_an_answer": statistics.mean(versions),
    }


def versions(subject: Subject, num_versions: int) -> dict[str, Any]:
    """Move a name to one version after the other; what is held after each tenth of them, and versions per second."""
    ended, held = threading.Event(), {}

    def beside() -> int:
        num = 0
        while not ended.is_set():
            subject.ask(max_tokens=16, on_new_version="continue")
            num += 1
        return num

    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(beside)
        try:
            for number in range(1, num_versions + 1):
                digest = subject.put(subject.file_body() if number % 2 else subject.tensors_body())["digest"]
                assert digest[:16] in subject.ask(max_tokens=1)["system_fingerprint"], "another version answers"
                if number % max(num_versions // 10, 1) == 0:
                    held[f"after_{number}"] = subject.held()
                    print(number, held[f"after_{number}"], file=sys.stderr, flush=True)
        except (httpx.TransportError, http.client.HTTPException, OSError) as error:
            error.add_note(subject.told_by_server())
            raise
        finally:
            ended.set()
    return {**held, "requests_beside": asked.result(), "per_second": num_versions / (time.perf_counter() - begin)}


def pauses(subject: Subject, num_requests: int, num_tokens: int) -> dict[str, Any]:
    """Medians in milliseconds."""
    quiet, resumed, gaps = [], [], []
    body = {"model": NAME, "prompt": [5, 6, 7], "ignore_eos": True, "max_tokens": num_tokens, "stream": True}
    with subject.running(num_requests - 1, num_tokens):
        with subject.http.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            times = [time.perf_counter() for _, _ in zip(lines, range(32), strict=False)]
            gaps += [(after - before) * 1e3 for before, after in pairwise(times)]
            for _ in range(_UPLOADS):
                begin = time.perf_counter()
                subject.http.post("/pause?mode=keep").raise_for_status()
                quiet.append((time.perf_counter() - begin) * 1e3)
                drained = threading.Thread(target=lambda: [next(lines) for _ in range(2)])
                begin = time.perf_counter()
                subject.http.post("/resume").raise_for_status()
                drained.start()
                drained.join()
                resumed.append((time.perf_counter() - begin) * 1e3)
        subject.http.post("/abort_requests", json={}).raise_for_status()
    told = {"pause_ms": quiet, "resume_to_second_token_ms": resumed, "step_ms": gaps}
    return {name: statistics.median(values) for name, values in told.items()}


def main() -> None:
    parser = parser_of("bench.adapters.rollout", __doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--versions", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=0)
    arguments = parser.parse_args()
    load, shape = load_of(arguments), SHAPES[arguments.shape]
    with tempfile.TemporaryDirectory() as directory:
        work_dir, model_dir = Path(directory), BUNDLED
        (work_dir / "none").mkdir()
        if shape is not None:
            model_dir = work_dir / "model"
            model_dir.mkdir()
            write_checkpoint(model_dir, shape, load.device, load.dtype)
        settings = {"device": load.device, "max_ephemeral_bytes": "4GiB", "preload_adapters_dir": work_dir / "none"}
        if load.device == "cpu":
            settings |= {"dtype": "float32", "num_threads": arguments.threads}
        else:
            settings |= {
                "kv_bytes": "16GiB",
                "adapter_row_bytes": "4GiB",
                "host_tier_bytes": "4GiB",
                "max_sequences": load.num_requests,
            }
        with running_server(model_dir, work_dir / "server", **settings) as server:
            wait_for(lambda: server.get("/ready").status_code == 200, "the server to be ready")
            result = facts_of(arguments)
            if arguments.versions:
                subject = Subject(server, model_dir, arguments.rank, are_whole=shape is not None)
                result["versions"] = versions(subject, arguments.versions)
            elif arguments.replicas:
                settings |= {"replicas": arguments.replicas}
                with running_server(model_dir, work_dir / "replicas", **settings) as many:
                    wait_for(lambda: many.get("/ready").status_code == 200, "the other server to be ready")
                    sides = (Subject(one, model_dir, arguments.rank) for one in (server, many))
                    result["times_of_one"] = beside_one(*sides)
            else:
                subject = Subject(server, model_dir, arguments.rank)
                sizes = load.num_requests, load.num_output_tokens
                result |= uploads(subject)
                if arguments.moves:
                    result["moves"] = moves(subject, *sizes, arguments.moves, arguments.rounds)
                result["pause"] = pauses(subject, *sizes)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
