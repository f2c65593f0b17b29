"""Stored responses through the real client: read, listed, continued, deleted, cancelled, bounded, and of one tenant."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from service.api import response_store
from service.api.response_store import ResponseStore, StoredResponse, new_id
from service.api.routes import stored_responses
from service.engine.ipc.link import TokenStream
from service.engine.ipc.messages import Finished, Submit, Tokens
from service.tenants.edit import add_key
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.scripted_server import ScriptedServer, make_text_model, scripted_server
from tests.support.http.server import running_server, start_server, wait_for
from tests.support.http.tool_templates import SPECIAL_TOKENS, TEMPLATES
from tests.support.limits import LIMIT_SECONDS

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BOUND_BYTES = 64 << 10


@dataclass(frozen=True)
class Stored:
    """A scripted server that stores responses, the files of one tenant, and clients of two."""

    server: ScriptedServer
    client: openai.OpenAI
    stranger: openai.OpenAI
    root: Path

    @property
    def files(self) -> list[Path]:
        """Those of the first tenant."""
        return sorted(self.root.glob("*/responses/acme/*"))

    def says(self, *texts: str) -> None:
        self.server.says(*texts)

    @property
    def prompt(self) -> str:
        return self.server.engine.last_prompt

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those of the last prompt."""
        return tuple(self.server.engine.submitted[-1].prompt_token_ids)

    def create(self, text: Any, **options: Any) -> Any:
        return self.client.responses.create(model=BASE, input=text, **options)


@pytest.fixture(scope="module")
def stored(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    root = tmp_path_factory.mktemp("stored")
    model_dir = make_text_model(checkpoints.base, root / "model", TEMPLATES["hermes"], SPECIAL_TOKENS["hermes"])
    keys = root / "keys.toml"
    keys.write_text("[tenants.acme]\n[tenants.zeta]\n")
    names = [add_key(keys, tenant, ("infer",))[0] for tenant in ("acme", "zeta")]
    settings: dict[str, Any] = {"model_name": BASE, "keys_file": keys, "responses_store_bytes": BOUND_BYTES}
    with scripted_server(model_dir, root / "store", max_len_tokens=100_000, **settings) as server:
        clients = [openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in names]
        with clients[0], clients[1]:
            yield Stored(server, *clients, root / "store")


@pytest.fixture
def endless(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests get one token and no end; the ids of those that were aborted."""
    engine, aborted = stored.server.engine, list[str]()

    def submit(request: Submit) -> TokenStream:
        stream = TokenStream(request.request_id, aborted.append)
        asyncio.get_running_loop().call_soon(stream.push, Tokens(request.request_id, (50,)))
        return stream

    monkeypatch.setattr(engine, "submit", submit)
    monkeypatch.setattr(engine, "abort", aborted.append)
    return aborted


def read(path: Path) -> StoredResponse:
    found = ResponseStore(path.parents[1], 0, 0).get(path.parent.name, path.stem)
    assert found is not None
    return found


def write(path: Path, found: StoredResponse) -> None:
    assert ResponseStore(path.parents[1], 1 << 30, 0).put(path.parent.name, found)


class TestConversations:
    def test_three_turns_with_a_call_are_the_conversation_sent_whole(self, stored: Stored) -> None:
        asked: Any = {"tools": [ADD]}
        stored.says("Wait.\n" + CALL, "It is 3.", "So it is.")
        first = stored.create("What is 1 + 2?", instructions="Be brief.", **asked)
        assert (first.store, first.previous_response_id) == (True, None)
        call = first.output[1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "result is 3"}
        second = stored.create([result], previous_response_id=first.id, **asked)
        assert "Be brief." not in stored.prompt
        third = stored.create("Sure?", previous_response_id=second.id, instructions="Be long.", **asked)
        assert (third.previous_response_id, third.output_text) == (second.id, "So it is.")
        chained = stored.prompt
        whole = [
            {"role": "user", "content": "What is 1 + 2?"},
            *(item.model_dump(exclude_none=True) for item in first.output),
            result,
            {"role": "assistant", "content": "It is 3."},
            {"role": "user", "content": "Sure?"},
        ]
        stored.create(whole, instructions="Be long.", store=False, **asked)
        assert chained == stored.prompt
        counted = stored.client.responses.input_tokens.count(
            model=BASE, input="Sure?", previous_response_id=second.id, instructions="Be long.", **asked
        )
        assert (counted.input_tokens, third.usage.input_tokens) == (len(stored.tokens), len(stored.tokens))
        assert "result is 3" in chained
        items = stored.client.responses.input_items.list(third.id, order="asc").data
        kinds = ["message", "message", "function_call", "function_call_output", "message", "message"]
        assert [item.type for item in items] == kinds
        assert items[2].id == call.id

    def test_thoughts_are_part_of_it(self, stored: Stored) -> None:
        thought = {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        }
        stored.says("So.")
        first = stored.create([{"role": "user", "content": "a"}, thought, {"role": "assistant", "content": "b"}])
        stored.create("c", previous_response_id=first.id)
        (item,) = [one for one in stored.client.responses.input_items.list(first.id) if one.type == "reasoning"]
        assert item.content[0].text == "hm"
        lines = read(stored.files[-1]).input
        assert [one["type"] for one in lines] == ["message", "reasoning", "message", "message", "message"]

    def test_a_call_that_was_cut_off_is_left_out(self) -> None:
        call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "add", "arguments": '{"a'}
        text = {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "x", "logprobs": [{}]}]}
        whole = {**call, "id": "fc_2", "arguments": "{}"}
        items = StoredResponse({"output": [{**one, "status": "incomplete"} for one in (text, call, whole)]}, []).items
        assert [item["id"] for item in items] == ["m", "fc_2"]
        assert items[0]["content"][0]["logprobs"] == []

    def test_it_may_be_longer_than_a_body_of_the_server_only_where_that_is_allowed(self, stored: Stored) -> None:
        stored.says("So.")
        first = stored.create("the")
        path = stored.files[-1]
        content = read(path)
        content.input[0]["content"] *= 1 << 15
        write(path, content)
        with pytest.raises(openai.APIStatusError) as caught:
            stored.create("a", previous_response_id=first.id)
        assert (caught.value.status_code, caught.value.param) == (413, "previous_response_id")
        assert "16384 items" in caught.value.message
        content.input[0]["content"] = [{"type": "input_text", "text": "a" * (5 << 20)}]
        write(path, content)
        with pytest.raises(openai.APIStatusError) as caught:
            stored.create("a", previous_response_id=first.id)
        assert (caught.value.status_code, "--max-body-bytes" in caught.value.message) == (413, True)
        path.unlink()


class TestReading:
    def test_it_is_what_was_answered(self, stored: Stored) -> None:
        stored.says("So.")
        answer = stored.create("the", metadata={"a": "b"}, instructions="Be brief.")
        found = stored.client.responses.retrieve(answer.id, include=["reasoning.encrypted_content"])
        assert found == answer
        assert stored.client.responses.retrieve(answer.id, stream=False) == answer

    def test_a_stream_is_stored_before_its_end_is_told(self, stored: Stored) -> None:
        stored.says("So it is.")
        with stored.client.responses.stream(model=BASE, input="the") as stream:
            for event in stream:
                if event.type == "response.created":
                    assert event.response.store  # type: ignore[attr-defined]
                if event.type == "response.completed":
                    assert stored.client.responses.retrieve(event.response.id).output_text == "So it is."
            final = stream.get_final_response()
        assert (
            stored.client.responses.retrieve(final.id).model_dump()
            == {
                **final.model_dump(),
                "output": [item.to_dict() for item in stored.client.responses.retrieve(final.id).output],
            }
            or stored.client.responses.retrieve(final.id).output_text == final.output_text
        )

    def test_one_that_reached_its_limit_is_incomplete_and_goes_on(self, stored: Stored) -> None:
        stored.says("one two three four")
        answer = stored.create("the", max_output_tokens=3)
        assert stored.client.responses.retrieve(answer.id).status == "incomplete"
        stored.create("go on", previous_response_id=answer.id)
        assert answer.output_text in stored.prompt

    def test_items_come_in_pages(self, stored: Stored) -> None:
        stored.says("So.")
        texts = [str(number) for number in range(45)]
        answer = stored.create([{"role": "user", "content": text} for text in texts])
        listed = stored.client.responses.input_items.list

        def said(items: Any) -> list[str]:
            return [item.content[0].text for item in items]

        page = listed(answer.id)
        assert (said(page.data), page.has_more) == (texts[::-1][:20], True)  # type: ignore[attr-defined]
        assert said(page) == texts[::-1]  # the client asks for the pages that follow
        assert said(listed(answer.id, order="asc", limit=7)) == texts
        last = listed(answer.id, order="asc", limit=5, after=page.data[4].id)
        assert (said(last.data), last.has_more) == (texts[41:], False)  # type: ignore[attr-defined]
        for wrong in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "none"}, {"x": 1}):
            with pytest.raises(openai.BadRequestError):
                listed(answer.id, extra_query=wrong)
        with pytest.raises(openai.BadRequestError, match="web_search"):
            listed(answer.id, include=["web_search_call.results"])

    def test_another_stream_of_it_is_refused_by_name(self, stored: Stored) -> None:
        stored.says("So.")
        answer = stored.create("the")
        for query, param in (({"stream": True}, "stream"), ({"starting_after": 3}, "starting_after")):
            with pytest.raises(openai.BadRequestError) as caught:
                stored.client.responses.retrieve(answer.id, extra_query=query)
            assert caught.value.param == param

    def test_what_is_not_to_be_stored_is_not(self, stored: Stored) -> None:
        stored.says("So.")
        before = stored.files
        answer = stored.create("the", store=False)
        assert (answer.store, stored.files) == (False, before)
        with pytest.raises(openai.NotFoundError):
            stored.client.responses.retrieve(answer.id)

    def test_a_deleted_one_is_gone_and_those_behind_it_stay(self, stored: Stored) -> None:
        stored.says("So.")
        first = stored.create("the lamp")
        second = stored.create("a", previous_response_id=first.id)
        stored.client.responses.delete(first.id)
        for call in (stored.client.responses.retrieve, stored.client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(first.id)  # type: ignore[operator]
        with pytest.raises(openai.NotFoundError) as caught:
            stored.create("b", previous_response_id=first.id)
        assert (caught.value.code, caught.value.param) == ("response_not_found", "previous_response_id")
        stored.create("b", previous_response_id=second.id)
        assert "the lamp" in stored.prompt

    @pytest.mark.parametrize(
        "name", ["x", "resp_", "resp_" + "0" * 32, "resp_" + "0" * 50_000, "../acme/x", "a%2Fb", "%00", "%C3%A4", "."]
    )
    def test_there_are_no_others(self, stored: Stored, name: str) -> None:
        headers = {"Authorization": f"Bearer {stored.client.api_key}"}
        url = f"{stored.server.url}/v1/responses/{name}"
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = httpx.request(method, url + path, headers=headers, timeout=LIMIT_SECONDS)
            assert answer.status_code in (404, 405) or (len(name) > 1000 and answer.status_code < 500)
        with pytest.raises(openai.NotFoundError):
            stored.create("a", previous_response_id=name)


class TestTenants:
    def test_another_s_is_as_one_that_is_not_there(self, stored: Stored) -> None:
        stored.says("So.")
        answer = stored.create("the")
        nobody = "resp_" + "0" * 32
        responses = stored.stranger.responses
        calls: tuple[Callable[[str], Any], ...] = (
            *(responses.retrieve, responses.delete, responses.cancel, responses.input_items.list),
            lambda name: responses.create(model=BASE, input="a", previous_response_id=name),
        )
        for call in calls:
            told = []
            for name in (answer.id, nobody):
                with pytest.raises(openai.NotFoundError) as caught:
                    call(name)
                told.append(caught.value.response.text.replace(name, "NAME"))
            assert told[0] == told[1]
        assert stored.client.responses.retrieve(answer.id) == answer

    def test_files_are_for_the_server_alone(self, stored: Stored) -> None:
        stored.says("So.")
        stored.create("the")
        modes = [path.stat().st_mode & 0o777 for path in (stored.files[-1], stored.files[-1].parent)]
        assert modes == [0o600, 0o700]


class TestEnds:
    def test_a_failed_stream_is_told_of(self, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
        def submit(request: Submit) -> TokenStream:
            stream = TokenStream(request.request_id, lambda _id: None)
            for message in (
                Tokens(request.request_id, (50,)),
                Finished(request.request_id, "error", error="It broke."),
            ):
                asyncio.get_running_loop().call_soon(stream.push, message)
            return stream

        monkeypatch.setattr(stored.server.engine, "submit", submit)
        stream = stored.create("the", stream=True)
        made = next(stream).response.id
        with pytest.raises(openai.APIError, match="It broke"):
            list(stream)
        found = stored.client.responses.retrieve(made)
        assert found.status == "failed"
        assert found.error is not None
        assert (found.error.code, found.error.message) == ("server_error", "It broke.")

    def test_a_client_that_goes_cancels(self, stored: Stored, endless: list[str]) -> None:
        stream = stored.create("the", stream=True)
        made = next(event for event in stream).response.id
        next(event for event in stream if event.type == "response.output_text.delta")
        stream.close()

        def found() -> Any:
            try:
                return stored.client.responses.retrieve(made)
            except openai.NotFoundError:
                return None

        answer = wait_for(found, "the response to be stored")
        assert (answer.status, answer.output[0].status, len(answer.output_text)) == ("cancelled", "incomplete", 1)
        assert endless

    def test_only_the_background_is_cancelled(self, stored: Stored) -> None:
        stored.says("So.")
        answer = stored.create("the")
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            stored.client.responses.cancel(answer.id)
        stored.client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{answer.id}' not found"):
            stored.client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="background can only be used when `store` is true"):
            stored.create("the", background=True, store=False)


class TestBackground:
    def test_it_goes_on_without_its_client(self, stored: Stored) -> None:
        stored.says("So it is.")
        begun = stored.create("the", background=True)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        retrieve = stored.client.responses.retrieve
        wait_for(lambda: retrieve(begun.id).status != "in_progress", "the response to be complete")
        ended = retrieve(begun.id)
        assert (ended.status, ended.output_text, ended.id) == ("completed", "So it is.", begun.id)
        assert stored.client.responses.cancel(begun.id) == ended
        stored.create("go on", previous_response_id=begun.id)
        assert "So it is." in stored.prompt

    def test_it_is_cancelled(self, stored: Stored, endless: list[str]) -> None:
        begun = stored.create("the", background=True)
        assert stored.client.responses.retrieve(begun.id).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="still running"):
            stored.create("a", previous_response_id=begun.id)
        with pytest.raises(openai.NotFoundError):
            stored.stranger.responses.cancel(begun.id)
        assert not endless
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda _: stored.client.responses.cancel(begun.id).status, range(8)))
        assert told == ["cancelled"] * 8
        assert endless
        assert stored.client.responses.retrieve(begun.id).status == "cancelled"

    def test_a_deleted_one_ends_and_stays_away(self, stored: Stored, endless: list[str]) -> None:
        begun = stored.create("the", background=True)
        stored.client.responses.delete(begun.id)
        assert endless
        with pytest.raises(openai.NotFoundError):
            stored.client.responses.retrieve(begun.id)

    @pytest.mark.parametrize("is_deleted", [False, True], ids=["cancelled", "deleted"])
    def test_another_server_of_the_store_ends_it(
        self, stored: Stored, endless: list[str], monkeypatch: pytest.MonkeyPatch, is_deleted: bool
    ) -> None:
        monkeypatch.setattr(stored_responses, "_LOOK_SECONDS", 0.02)
        begun = stored.create("the", background=True)
        (root,) = stored.root.glob("*/responses")
        other = ResponseStore(root, BOUND_BYTES, 0)
        seen = other.get("acme", begun.id)
        assert seen is not None
        assert seen.response["status"] == "in_progress", "the server that runs it lives"
        if is_deleted:
            assert other.delete("acme", begun.id)
        else:
            assert other.put("acme", StoredResponse({**seen.response, "status": "cancelled"}, seen.input))
        wait_for(lambda: endless, "the sequence to be aborted")
        left = other.get("acme", begun.id)
        assert (left is None) if is_deleted else (left is not None and left.response["status"] == "cancelled")

    def test_what_cannot_be_is_refused(self, stored: Stored) -> None:
        for fields in ({"stream": True}, {"store": False}):
            with pytest.raises(openai.BadRequestError) as caught:
                stored.create("a", background=True, **fields)
            assert caught.value.param == "background"


class TestBounds:
    def test_the_oldest_go_first(self, stored: Stored) -> None:
        stored.says("So.")
        made = [stored.create("the lamp " * 200).id for _ in range(60)]
        sizes = [path.stat().st_size for path in stored.files]
        assert BOUND_BYTES * 3 // 4 < sum(sizes) <= BOUND_BYTES
        there = [path.stem for path in stored.files]
        assert there == made[-len(there) :]
        assert 10 < len(there) < 60

    def test_their_number_is_bounded_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(response_store, "MAX_RESPONSES", 32)
        store, names = ResponseStore(tmp_path, 1 << 20, 0), [f"resp_{number:032x}" for number in range(100)]
        # As a kill leaves it: what was to become the oldest of all.
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / f".{names[0]}.json.new").write_bytes(b"{")
        for name in names:
            assert store.put("a", StoredResponse({"id": name, "status": "completed"}, []))
            assert store.put("b", StoredResponse({"id": names[0], "status": "completed"}, []))
        # What another server is about to rename is as young as its name says.
        young = tmp_path / "a" / f".resp_{'f' * 32}.json.new"
        young.write_bytes(b"{")
        for name in names[-20:]:
            assert store.put("a", StoredResponse({"id": name, "status": "completed"}, []))
        young.unlink()
        there = sorted(path.stem for path in (tmp_path / "a").iterdir())
        assert there == names[-len(there) :]
        assert 28 < len(there) <= 32
        assert store.get("b", names[0]) is not None

    def test_servers_that_share_it_hold_hardly_more(self, tmp_path: Path) -> None:
        stores, bound = [ResponseStore(tmp_path, 1 << 16, 0) for _ in range(4)], 1 << 16
        for number in range(400):
            assert stores[number % 4].put("a", StoredResponse({"id": new_id(), "text": "x" * 1000}, []))
            held = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
            assert held <= bound + 4 * bound // 16

    def test_what_does_not_fit_is_not_stored_and_says_so(self, stored: Stored) -> None:
        stored.says("So.")
        there = stored.files
        answer = stored.client.responses.with_raw_response.create(model=BASE, input="a " * (BOUND_BYTES // 2))
        assert answer.headers["x-multilora-left-out"] == "store"
        assert (answer.parse().store, stored.files) == (False, there)  # type: ignore[attr-defined]
        events: list[Any] = list(stored.create("a " * (BOUND_BYTES // 2), stream=True))
        assert (events[0].response.store, events[-1].response.store) == (True, False)
        with pytest.raises(openai.BadRequestError) as caught:
            stored.create("a " * (BOUND_BYTES // 2), background=True)
        assert caught.value.param == "background"

    @pytest.mark.parametrize(
        "fields", [{"metadata": {"a": "\\ud800"}}, {"input": [{"type": "reasoning", "content": "\\ud800"}]}], ids=str
    )
    def test_what_cannot_be_written_is_refused_before_it_runs(self, stored: Stored, fields: dict[str, Any]) -> None:
        body = json.dumps({"input": "a", **fields}).replace("\\\\", "\\")
        headers = {"Authorization": f"Bearer {stored.client.api_key}", "Content-Type": "application/json"}
        answer = httpx.post(f"{stored.server.url}/v1/responses", content=body, headers=headers, timeout=LIMIT_SECONDS)
        assert (answer.status_code, "surrogate" in answer.text) == (400, True)

    def test_a_full_disk_stores_nothing(self, tmp_path: Path) -> None:
        store = ResponseStore(tmp_path, 1 << 20, 1 << 62)
        assert not store.put("a", StoredResponse({"id": new_id()}, []))
        (tmp_path / "b").write_text("no directory")
        assert not ResponseStore(tmp_path, 1 << 20, 0).put("b", StoredResponse({"id": new_id()}, []))

    def test_what_nobody_works_on_any_more_has_failed(self, tmp_path: Path) -> None:
        store, name = ResponseStore(tmp_path, 1 << 20, 0), new_id()
        assert store.put("a", StoredResponse({"id": name, "status": "in_progress"}, []))

        def status() -> str:
            found = ResponseStore(tmp_path, 1 << 20, 0).get("a", name)
            assert found is not None
            return str(found.response["status"])

        with store.claim("a", name):
            assert status() == "in_progress"
        assert status() == "failed"

    def test_names_beside_the_ids_are_no_ids(self, stored: Stored) -> None:
        headers = {"Authorization": f"Bearer {stored.client.api_key}"}
        count, compact = (f"{stored.server.url}/v1/responses/{name}" for name in ("input_tokens", "compact"))
        answer = httpx.get(count, headers=headers, timeout=LIMIT_SECONDS)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        answer = httpx.post(compact, headers=headers, json={}, timeout=LIMIT_SECONDS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")

    @pytest.mark.parametrize(
        "damage",
        [
            lambda _: b"",
            lambda content: content[:20],
            lambda content: content[:-1],
            lambda content: content.replace(b"completed", b"cancelled", 1),
            lambda content: content.replace(b'"input":[', b'"input":[{},'),
            lambda _: b'{"response": {}, "input": []}',
        ],
        ids=["empty", "torn", "shorter", "edited", "edited input", "another"],
    )
    def test_a_torn_or_edited_file_is_as_none(self, stored: Stored, damage: Callable[[bytes], bytes]) -> None:
        stored.says("So.")
        name, path = stored.create("the").id, stored.files[-1]
        path.write_bytes(damage(path.read_bytes()))
        responses = stored.client.responses
        for call in (responses.retrieve, responses.cancel, responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(name)
        with pytest.raises(openai.NotFoundError):
            stored.create("a", previous_response_id=name)
        path.unlink()


@pytest.mark.wide
def test_a_kill_leaves_whole_responses_which_all_servers_of_the_store_know(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "model_name": BASE,
        "responses_store_bytes": "64MiB",
        "store_shared": True,
        "store_dir": tmp_path / "store",
    }
    server = start_server(checkpoints.endless_base, tmp_path / "first", **settings)
    with openai.OpenAI(base_url=server.openai_url, api_key="x", max_retries=0, timeout=LIMIT_SECONDS) as client:
        long: Any = {"extra_body": {"ignore_eos": True}, "max_output_tokens": 15_000}
        background = client.responses.create(model=BASE, input="the", background=True, **long).id
        short: Any = {"extra_body": {"ignore_eos": True}, "max_output_tokens": 2}
        told: list[str] = []

        def create(number: int) -> None:
            try:
                answer = client.responses.create(model=BASE, input=f"lamp {number}", **short)
            except openai.APIError:
                return
            told.append(answer.id)
            if len(told) == 100:
                os.kill(server.process.pid, signal.SIGKILL)

        with (
            running_server(checkpoints.endless_base, tmp_path / "second", **settings) as other,
            openai.OpenAI(base_url=other.openai_url, api_key="x", max_retries=0) as beside,
        ):
            assert beside.responses.retrieve(background).status == "in_progress"
            with ThreadPoolExecutor(200) as pool:
                list(pool.map(create, range(200)))
            server.process.wait(LIMIT_SECONDS)
            assert len(told) >= 100
            for name in told:
                assert beside.responses.retrieve(name).status == "incomplete"
            lost = wait_for(lambda: _ended(beside, background), "the lost response to be told of")
            assert (lost.status, "The server ended" in lost.error.message) == ("failed", True)
            assert beside.responses.cancel(background).status == "failed"
            beside.responses.create(model=BASE, input="go on", previous_response_id=told[0], max_output_tokens=2)
    for path in (tmp_path / "store").glob("*/responses/*/*.json"):
        read(path)


def _ended(client: openai.OpenAI, name: str) -> Any:
    found = client.responses.retrieve(name)
    return None if found.status == "in_progress" else found
