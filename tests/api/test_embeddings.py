"""/v1/embeddings over HTTP, with the real client; that the numbers are right is shown in tests/parity."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch

from tests.api.conftest import BASE
from tests.support.http.server import Server
from tests.support.models.tiny_models import VOCAB_SIZE
from tests.tolerances import OP

TEXT = "the thing in the tin"
# Of numbers between -1 and 1: sums depend on what else is in a step, but for rounding.
CLOSE = OP[torch.float32][0]


def embedded(server: Server, given: Any, **fields: Any) -> list[list[float]]:
    answer = server.post("/v1/embeddings", json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


def token_ids(server: Server, text: str) -> list[int]:
    ids: list[int] = server.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def length(vector: Sequence[float]) -> float:
    return math.sqrt(sum(number * number for number in vector))


class TestAnswers:
    def test_the_client_asks_for_bytes_and_reads_them(self, client: openai.OpenAI, server: Server) -> None:
        answer = client.embeddings.create(model="alpha", input=[TEXT, "a tin"])
        assert (answer.object, answer.model) == ("list", "alpha")
        numbers = [one.embedding for one in answer.data]
        plain = client.embeddings.create(model="alpha", input=[TEXT, "a tin"], encoding_format="float").data
        for found, one in zip(numbers, plain, strict=True):
            assert found == pytest.approx(one.embedding, abs=CLOSE)
        assert answer.usage.prompt_tokens == len(token_ids(server, TEXT)) + len(token_ids(server, "a tin"))
        assert answer.usage.total_tokens == answer.usage.prompt_tokens
        told, usage = answer.model_extra or {}, answer.usage.model_extra  # vLLM's clients read these
        assert told["id"].startswith("embd-")
        assert told["created"] > 1_700_000_000
        assert usage == {"completion_tokens": 0, "prompt_tokens_details": None}
        chat = client.completions.create(model="alpha", prompt="the", max_tokens=1)
        assert answer.system_fingerprint == chat.system_fingerprint  # type: ignore[attr-defined]

    def test_base64_is_float32_little_endian(self, server: Server) -> None:
        (plain,) = embedded(server, TEXT)
        (coded,) = embedded(server, TEXT, encoding_format="base64")
        assert array("f", base64.b64decode(coded)).tolist() == plain  # type: ignore[arg-type]

    def test_the_four_forms_of_input_are_the_same_prompts(self, server: Server) -> None:
        ids, others = token_ids(server, TEXT), token_ids(server, "a tin")
        (one,) = embedded(server, TEXT)
        for form in ([TEXT], ids, [ids]):
            assert embedded(server, form) == [pytest.approx(one, abs=CLOSE)]
        both = embedded(server, [TEXT, "a tin"])
        assert embedded(server, [ids, others]) == [pytest.approx(vector, abs=CLOSE) for vector in both]
        assert both[0] == pytest.approx(one, abs=CLOSE)
        assert both[0] != both[1]

    @pytest.mark.parametrize("pooling", ["last", "mean"])
    def test_the_length_is_one_unless_the_client_wants_it_as_it_is(self, server: Server, pooling: str) -> None:
        (plain,) = embedded(server, TEXT, pooling=pooling, normalize=False)
        (unit,) = embedded(server, TEXT, pooling=pooling)
        assert length(unit) == pytest.approx(1)
        assert length(plain) > 1.5
        assert unit == pytest.approx([number / length(plain) for number in plain], abs=1e-6)
        assert unit == embedded(server, TEXT, pooling=pooling, normalize=True)[0]
        assert unit == embedded(server, TEXT, pooling=pooling, use_activation=True)[0]
        assert plain == embedded(server, TEXT, pooling=pooling, use_activation=False)[0]

    def test_last_is_the_default_and_a_mean_is_of_all_tokens(self, server: Server) -> None:
        ids = token_ids(server, TEXT)
        raw: dict[str, Any] = {"normalize": False}
        assert embedded(server, TEXT, **raw) == embedded(server, TEXT, pooling="last", **raw)
        prefixes = [ids[: end + 1] for end in range(len(ids))]
        mean = [sum(numbers) / len(ids) for numbers in zip(*embedded(server, prefixes, **raw), strict=True)]
        assert embedded(server, ids, pooling="mean", **raw)[0] == pytest.approx(mean, abs=1e-4)

    def test_each_adapter_has_its_own(self, server: Server) -> None:
        found = [embedded(server, TEXT, model=name)[0] for name in (BASE, "alpha", "beta", f"{BASE}:alpha")]
        assert found[1] == found[3]
        assert len({tuple(vector) for vector in found}) == 3
        assert embedded(server, TEXT, adapter_id="beta")[0] == found[2]

    def test_more_inputs_than_run_at_a_time(self, server: Server) -> None:
        """As many as OpenAI takes, in the order in which they were sent."""
        ids = [[20 + i % 200, 30 + i % 7] for i in range(2048)]
        found = embedded(server, ids, encoding_format="base64")
        assert len(found) == 2048
        for index in (0, 63, 64, 1000, 2047):
            (alone,) = embedded(server, ids[index])
            assert array("f", base64.b64decode(found[index])).tolist() == pytest.approx(alone, abs=CLOSE)  # type: ignore[arg-type]
        assert server.metric("num_requests_open") == 0

    def test_prompts_of_the_whole_context_and_truncated_ones(self, server: Server) -> None:
        ids = [20 + i % 200 for i in range(600)]
        whole = embedded(server, ids[-512:])
        assert embedded(server, ids, truncate_prompt_tokens=-1) == whole
        assert embedded(server, ids, truncate_prompt_tokens=5) == embedded(server, ids[-5:])
        assert embedded(server, ids, truncate_prompt_tokens=5, truncation_side="right") == embedded(server, ids[:5])

    def test_what_asks_for_nothing_is_accepted(self, server: Server, client: openai.OpenAI) -> None:
        size = len(embedded(server, TEXT)[0])
        nothing: dict[str, Any] = {"user": "ann", "priority": 0, "dimensions": size, "embed_dtype": "float32"}
        nulls = ("pooling", "normalize", "encoding_format", "truncate_prompt_tokens", "model")
        assert embedded(server, TEXT, **nothing, **dict.fromkeys(nulls)) == embedded(server, TEXT)
        assert len(client.embeddings.create(model=BASE, input=TEXT, dimensions=size).data[0].embedding) == size


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["the", ""]}, "input[1]"),
        ({"input": "the", "normalize": True, "use_activation": False}, "use_activation"),
        ({"input": [[]]}, "input[0]"),
        ({"input": {"text": "the"}}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": ["the", 5]}, "input"),
        ({"input": [[1, -2]]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [VOCAB_SIZE]}, "input"),
        ({"input": [[5], [VOCAB_SIZE]]}, "input[1]"),
        ({"input": [7] * 513}, "input"),
        ({"input": "word " * 2000}, "input"),
        ({"input": "x" * 1_100_000, "truncate_prompt_tokens": 5}, "input"),
        ({"input": "the", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"input": "the", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "the", "dimensions": 3}, "dimensions"),
        ({"input": "the", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "the", "pooling": "cls"}, "pooling"),
        ({"input": "the", "embed_dtype": "bfloat16"}, "embed_dtype"),
        ({"input": "the", "lora_path": "alpha"}, "lora_path"),
        ({"input": "the", "temperature": 0}, "temperature"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_a_400_that_names_it(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/embeddings", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert server.metric("num_requests_open") == 0


def test_an_unknown_adapter_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.embeddings.create(model="nobody", input="the")
