"""/classify, /pooling, /score and /rerank over HTTP; that heads' logits are PEFT's is shown in tests/parity."""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer

from service.models.layouts import layout_in
from tests.api.conftest import BASE, Checkpoints
from tests.support.adapter_files import config_bytes, lora_tensors, modules_ending, safetensors_bytes
from tests.support.http.server import Server
from tests.tolerances import OP

CLOSE = OP[torch.float32][0]
QUERY, DOCUMENTS = "the thing in the tin", ["a tin", "another thing and the tin", "", "in the thing"]
WEIGHT, BIAS = "base_model.model.score.weight", "base_model.model.score.bias"
SEQ_CLS = {"task_type": "SEQ_CLS"}
LABELS = {"0": "sad", "1": "so so", "2": "glad"}
_HIDDEN = 64


def head(num_labels: int, *, seed: int, bias: bool = False, name: str = "score") -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    tensors = {f"base_model.model.{name}.weight": generator.standard_normal((num_labels, _HIDDEN)).astype("<f4")}
    if bias:
        tensors[f"base_model.model.{name}.bias"] = generator.standard_normal(num_labels).astype("<f4")
    return tensors


def files_of(
    checkpoints: Checkpoints, tensors: dict[str, np.ndarray], model_config: dict[str, Any] | None = None, **fields: Any
) -> list[tuple[str, tuple[str, bytes]]]:
    layout = layout_in(checkpoints.base)
    lora = lora_tensors(layout, modules_ending(layout, "q_proj"), 2, seed=11)
    small = {name: (values * 0.1).astype("<f4") for name, values in lora.items()}
    files = {"adapter_config.json": config_bytes(r=2, **fields)}
    if model_config is not None:
        files["config.json"] = json.dumps(model_config).encode()
    files["adapter_model.safetensors"] = safetensors_bytes({**small, **tensors})
    return [("file", one) for one in files.items()]


TOPICS, JUDGE = head(3, seed=1, bias=True, name="classifier"), head(1, seed=2)


@pytest.fixture(scope="module", autouse=True)
def adapters(server: Server, checkpoints: Checkpoints) -> Iterator[None]:
    """`topics`: three labels; `many`: the same without names, one label each; `judge`: one; `yes-no`: no head."""
    sent = {
        "topics": files_of(checkpoints, TOPICS, {"id2label": LABELS}, task_type="SEQ_CLS"),
        "each": files_of(checkpoints, TOPICS, task_type="SEQ_CLS", problem_type="multi_label_classification"),
        "judge": files_of(checkpoints, JUDGE, modules_to_save=["score"]),
        "grade": files_of(checkpoints, JUDGE, task_type="SEQ_CLS", problem_type="regression"),
        "yes-no": files_of(checkpoints, {}, classifier_from_token=["n", "y"]),
    }
    for name, files in sent.items():
        answer = server.post("/v1/adapters", data={"name": name}, files=files)
        assert answer.status_code == 201, answer.text
    yield
    for name in sent:
        server.http.delete(f"{server.url}/v1/adapters/{name}")


def asked(server: Server, path: str, **body: Any) -> Any:
    answer = server.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logits(server: Server, model: str, tensors: dict[str, np.ndarray], given: Any) -> np.ndarray:
    """Scores of the adapter's own hidden states."""
    data = asked(server, "/v1/embeddings", model=model, input=given, normalize=False)["data"]
    weight, *bias = tensors.values()
    return np.array([one["embedding"] for one in data]) @ weight.T.astype(float) + sum(bias)


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


@pytest.fixture(scope="module")
def pair_ids(checkpoints: Checkpoints) -> list[list[int]]:
    """The pairs as transformers' tokenizers join them."""
    tokenizer = Tokenizer.from_file(str(checkpoints.base / "tokenizer.json"))
    return [tokenizer.encode(QUERY, one).ids for one in DOCUMENTS]


class TestClassify:
    def test_probabilities_are_the_softmax_of_the_head(self, server: Server) -> None:
        answer = asked(server, "/classify", model="topics", input=[QUERY, "a tin"])
        assert (answer["object"], answer["model"]) == ("list", "topics")
        assert answer["id"].startswith("classify-")
        expected = softmax(logits(server, "topics", TOPICS, [QUERY, "a tin"]))
        for index, one in enumerate(answer["data"]):
            assert (one["index"], one["num_classes"]) == (index, 3)
            assert one["probs"] == pytest.approx(expected[index], abs=CLOSE)
            assert one["label"] == list(LABELS.values())[int(expected[index].argmax())]
        num_tokens = sum(server.post("/tokenize", json={"prompt": one}).json()["count"] for one in (QUERY, "a tin"))
        empty = {"completion_tokens": 0, "prompt_tokens_details": None}
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens, **empty}

    @pytest.mark.parametrize(
        ("model", "tensors", "activation"),
        [("each", TOPICS, sigmoid), ("judge", JUDGE, sigmoid), ("grade", JUDGE, lambda values: values)],
    )
    def test_the_problem_type_chooses_the_activation(
        self, server: Server, model: str, tensors: dict[str, np.ndarray], activation: Any
    ) -> None:
        (one,) = asked(server, "/classify", model=model, input=QUERY)["data"]
        expected = logits(server, model, tensors, QUERY)[0]
        assert one["probs"] == pytest.approx(activation(expected), abs=10 * CLOSE)
        assert one["label"] == f"LABEL_{expected.argmax()}"
        (raw,) = asked(server, "/classify", model=model, input=QUERY, use_activation=False)["data"]
        assert raw["probs"] == pytest.approx(expected, abs=10 * CLOSE)

    def test_more_inputs_than_run_at_a_time_keep_their_order(self, server: Server) -> None:
        ids = [[20 + i % 200, 30 + i % 7] for i in range(500)]
        found = asked(server, "/classify", model="topics", input=ids)["data"]
        assert [one["index"] for one in found] == list(range(500))
        for index in (0, 63, 64, 499):
            (alone,) = asked(server, "/classify", model="topics", input=ids[index])["data"]
            assert found[index]["probs"] == pytest.approx(alone["probs"], abs=CLOSE)
        assert server.metric("num_requests_open") == 0

    def test_the_report_names_the_labels(self, server: Server) -> None:
        assert server.get("/v1/adapters/topics").json()["labels"] == list(LABELS.values())
        assert server.get("/v1/adapters/alpha").json()["labels"] == []


class TestPooling:
    def test_the_task_chooses(self, server: Server) -> None:
        (probs,) = asked(server, "/classify", model="topics", input=QUERY)["data"]
        for fields in ({}, {"task": "classify"}):
            (one,) = asked(server, "/pooling", model="topics", input=QUERY, **fields)["data"]
            assert one["object"] == "pooling"
            assert one["data"] == pytest.approx(probs["probs"], abs=CLOSE)
        (vector,) = asked(server, "/v1/embeddings", model="topics", input=QUERY)["data"]
        (one,) = asked(server, "/pooling", model="topics", input=QUERY, task="embed", encoding_format="base64")["data"]
        assert array("f", base64.b64decode(one["data"])).tolist() == pytest.approx(vector["embedding"], abs=CLOSE)
        (plain,) = asked(server, "/pooling", input=QUERY)["data"]
        assert len(plain["data"]) == _HIDDEN
        (one,) = asked(server, "/pooling", model="judge", input=QUERY, task="score")["data"]
        assert one["data"] == pytest.approx(sigmoid(logits(server, "judge", JUDGE, QUERY)[0]), abs=10 * CLOSE)


class TestScores:
    def test_a_head_scores_pairs_as_the_tokenizer_joins_them(self, server: Server, pair_ids: list[list[int]]) -> None:
        expected = sigmoid(logits(server, "judge", JUDGE, pair_ids)[:, 0])
        forms: list[dict[str, Any]] = [
            {"text_1": QUERY, "text_2": DOCUMENTS},
            {"queries": [QUERY], "documents": DOCUMENTS},
            {"text_1": [QUERY] * len(DOCUMENTS), "text_2": DOCUMENTS},
        ]
        for path in ("/score", "/v1/score"):
            for form in forms:
                answer = asked(server, path, model="judge", **form)
                assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=10 * CLOSE)
        (one,) = asked(server, "/score", model="judge", text_1=QUERY, text_2=DOCUMENTS[1])["data"]
        assert (one["index"], one["object"]) == (0, "score")
        assert one["score"] == pytest.approx(expected[1], abs=10 * CLOSE)

    @pytest.mark.parametrize("model", ["judge", "yes-no"])
    def test_documents_are_ranked_and_cut(self, server: Server, model: str) -> None:
        scores = [one["score"] for one in asked(server, "/score", model=model, text_1=QUERY, text_2=DOCUMENTS)["data"]]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        objects: list[Any] = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            answer = asked(server, path, model=model, query=QUERY, documents=objects, top_n=0)
            assert [one["index"] for one in answer["results"]] == order
            assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(sorted(scores, reverse=True))
            shown = [one.get("document") for one in answer["results"]]
            assert shown == [None if path == "/v2/rerank" else {"text": DOCUMENTS[index]} for index in order]
        best = asked(
            server, "/v2/rerank", model=model, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True
        )
        assert [one["index"] for one in best["results"]] == order[:2]
        assert best["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
        assert best["meta"]["tokens"]["input_tokens"] == best["usage"]["prompt_tokens"]
        long, short = "the tin " * 300, "the tin"
        for field in ({"truncate_prompt_tokens": 300}, {"truncate_prompt_tokens": -1}, {"max_tokens_per_doc": 2}):
            cut = asked(server, "/rerank", model=model, query=QUERY, documents=[long, short], **field)
            assert {one["index"] for one in cut["results"]} == {0, 1}
        assert cut["results"][0]["relevance_score"] == pytest.approx(cut["results"][1]["relevance_score"], abs=CLOSE)

    def test_fields_of_documents_are_ranked_as_cohere_and_jina_have_them(self, server: Server) -> None:
        odd = {"id": 5, "tags": [None, {"a": "\ud800"}], "model_extra": 1e300}
        objects = [{"text": text, "title": text[:5], **odd} for text in DOCUMENTS[:2]]
        ranked = {"model": "judge", "query": QUERY}
        for fields, texts, shown in (
            ({}, DOCUMENTS[:2], [{"text": text} for text in DOCUMENTS[:2]]),
            (
                {"rank_fields": ["title", "text"]},
                [f"{text[:5]}\n{text}" for text in DOCUMENTS[:2]],
                [{"title": text[:5], "text": text} for text in DOCUMENTS[:2]],
            ),
        ):
            plain = asked(server, "/rerank", **ranked, documents=texts)["results"]
            body = json.dumps({**ranked, "documents": objects, **fields})
            answer = server.post("/rerank", content=body, headers={"Content-Type": "application/json"})
            results = answer.json()["results"]
            assert [one["index"] for one in results] == [one["index"] for one in plain]
            assert [one["document"] for one in results] == [shown[one["index"]] for one in results]
            scores = [one["relevance_score"] for one in plain]
            assert [one["relevance_score"] for one in results] == pytest.approx(scores, abs=CLOSE)

    def test_yes_and_no_are_compared_behind_the_template(self, server: Server, checkpoints: Checkpoints) -> None:
        """As Qwen3-Reranker's model card has it: the template around the pair, and two logits of the last token."""
        tokenizer = Tokenizer.from_file(str(checkpoints.base / "tokenizer.json"))

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        def expected(instruction: str, document: str) -> float:
            before = (
                "<s><|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
                'Instruct provided. Note that the answer can only be "y" or "n".<|im_end|>\n<|im_start|>user\n'
            )
            pair = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
            prompt = [*ids(before), *ids(pair), *ids("<|im_end|>\n<|im_start|>assistant\n")]
            no, yes = tokenizer.token_to_id("n"), tokenizer.token_to_id("y")
            fields = {"max_tokens": 1, "logprobs": 0, "logprob_token_ids": [no, yes], "temperature": 0}
            answer = asked(
                server, "/v1/completions", model="yes-no", prompt=prompt, return_tokens_as_token_ids=True, **fields
            )
            (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
            return 1 / (1 + math.exp(top[f"token_id:{no}"] - top[f"token_id:{yes}"]))

        usual = "Given a web search query, retrieve relevant passages that answer the query"
        for fields, instruction in (({}, usual), ({"instruction": "Find tins"}, "Find tins")):
            answer = asked(server, "/score", model="yes-no", text_1=QUERY, text_2=DOCUMENTS, **fields)
            scores = [one["score"] for one in answer["data"]]
            assert scores == pytest.approx([expected(instruction, one) for one in DOCUMENTS], abs=10 * CLOSE)
            assert len(set(scores)) == len(DOCUMENTS)


TRUNCATE = "truncate_prompt_tokens"
PAIR: dict[str, Any] = {"text_1": "a", "text_2": "b"}
RANKED: dict[str, Any] = {"model": "judge", "query": "a"}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/classify", {"input": "a"}, "model", "The base has no score head"),
        ("/classify", {"model": "alpha", "input": "a"}, "model", "'alpha' has no score head"),
        ("/classify", {"model": "yes-no", "input": "a"}, "model", "no score head"),
        ("/classify", {"model": "topics"}, "input", ""),
        ("/classify", {"model": "topics", "input": []}, "input", "empty list"),
        ("/classify", {"model": "topics", "input": {"text": "a"}}, "input", ""),
        ("/classify", {"model": "topics", "input": "a", "softmax": False}, "softmax", "use_activation"),
        ("/classify", {"model": "topics", "messages": [{"role": "user", "content": "a"}]}, "messages", "`input`"),
        ("/pooling", {"model": "topics", "input": "a", "task": "token_embed"}, "task", "token_embed"),
        ("/pooling", {"model": "topics", "input": "a", "task": "plugin"}, "task", "plugin"),
        ("/pooling", {"model": "topics", "input": "a", "task": "score"}, "model", "3 labels"),
        ("/pooling", {"model": "alpha", "input": "a", "task": "classify"}, "model", "no score head"),
        ("/score", PAIR, "model", "The base scores no pairs"),
        ("/score", {"model": "alpha", **PAIR}, "model", "'alpha' scores no pairs"),
        ("/score", {"model": "topics", **PAIR}, "model", "3 labels"),
        ("/score", {"model": "judge", **PAIR, "instruction": "x"}, "instruction", "takes no `instruction`"),
        ("/score", {"model": "judge", "text_1": "a"}, "text_2", "either"),
        ("/score", {"model": "judge", **PAIR, "queries": "a"}, "text_1", "either"),
        ("/score", {"model": "judge", "text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_2", "send as many"),
        ("/score", {"model": "judge", "text_1": "a", "text_2": []}, "text_2", "empty list"),
        ("/score", {"model": "judge", "text_1": "a", "text_2": ["b", 5]}, "text_2", "list of texts"),
        ("/score", {"model": "judge", "text_1": "a", "text_2": ["b", "x " * 600]}, "text_2[1]", "shorten it"),
        ("/score", {"model": "judge", "text_1": "", "text_2": ""}, "text_2", "no tokens"),
        ("/score", {"model": "judge", "text_1": "a", "text_2": "\ud800"}, None, "surrogate"),
        ("/score", {"model": "judge", "text_1": "a " * 9, "text_2": "b", TRUNCATE: 5}, TRUNCATE, "no room"),
        ("/score", {"model": "judge", **PAIR, TRUNCATE: 513}, TRUNCATE, "513"),
        ("/rerank", {"model": "judge", "query": "a", "documents": []}, "documents", "empty list"),
        ("/rerank", {"model": "judge", "query": "a", "documents": ["b"] * 10_000}, "documents", "at most 2048 items"),
        ("/rerank", {"model": "judge", "query": "a", "documents": [{"image": "b"}]}, "documents[0].text", "be a text"),
        ("/rerank", {**RANKED, "documents": [{"text": "a"}], "rank_fields": ["title"]}, "documents[0].title", "text"),
        ("/rerank", {**RANKED, "documents": [{"__doc__": 5}], "rank_fields": ["__doc__"]}, "documents[0].__doc__", ""),
        ("/rerank", {**RANKED, "documents": [{"a": "\ud800"}], "rank_fields": ["a"]}, None, "surrogate"),
        ("/rerank", {**RANKED, "documents": ["b"], "rank_fields": ["a", "a"]}, "rank_fields", "twice"),
        ("/rerank", {**RANKED, "documents": ["b"], "rank_fields": []}, "rank_fields", "at least 1"),
        ("/rerank", {"model": "judge", "query": ["a"], "documents": ["b"]}, "query", ""),
        ("/rerank", {"model": "judge", "query": "a", "documents": ["b"], "top_n": -1}, "top_n", ""),
        ("/v1/rerank", {"model": "yes-no", "query": "a", "documents": ["x " * 600]}, "documents[0]", "shorten it"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_cannot_be_done_is_a_400_that_says_why(
    server: Server, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    answer = server.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert words in answer.json()["error"]["message"]
    assert server.metric("num_requests_open") == 0


def test_the_tokens_of_all_pairs_are_bounded(server: Server) -> None:
    """A query of nearly the whole context, for each of many documents."""
    body = {"model": "judge", "query": "a " * 250, "documents": ["b"] * 2048}
    assert len(asked(server, "/rerank", **body, top_n=1)["results"]) == 1


@pytest.mark.parametrize("name", ["topics", "each", "judge", "grade"])
def test_an_adapter_with_a_head_comes_out_and_back(server: Server, name: str) -> None:
    report = server.get(f"/v1/adapters/{name}").json()
    answer = server.get(f"/v1/adapters/{name}/archive")
    assert answer.status_code == 200, answer.text
    again = server.post("/v1/adapters", data={"name": "again"}, files={"archive": ("a.tar.gz", answer.content)})
    assert (again.status_code, again.json()["digest"]) == (201, report["digest"]), again.text
    assert server.get("/v1/adapters/again").json()["labels"] == report["labels"]
    server.http.delete(f"{server.url}/v1/adapters/again")


def test_an_adapter_with_a_head_generates_nothing(client: openai.OpenAI) -> None:
    for model in ("topics", f"{BASE}:judge"):
        with pytest.raises(openai.BadRequestError, match="has a score head"):
            client.completions.create(model=model, prompt="the")
        with pytest.raises(openai.BadRequestError, match="/classify"):
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": "the"}])
        with pytest.raises(openai.BadRequestError, match="has a score head"):
            client.responses.create(model=model, input="the")


@pytest.mark.parametrize(
    ("tensors", "fields", "words"),
    [
        ({}, SEQ_CLS, "needs a score head"),
        (head(2, seed=3), {}, "names none: add 'score' to modules_to_save"),
        ({WEIGHT: np.zeros((0, _HIDDEN), "<f4")}, SEQ_CLS, "it is empty"),
        ({WEIGHT: np.zeros((100_000, _HIDDEN), "<f4")}, SEQ_CLS, "100000 labels"),
        ({WEIGHT: np.zeros((2, 63), "<f4")}, SEQ_CLS, "64 wide"),
        ({WEIGHT: np.full((2, _HIDDEN), np.nan, "<f4")}, SEQ_CLS, "NaN"),
        ({BIAS: np.zeros(2, "<f4")}, SEQ_CLS, "needs a score head"),
        ({**head(2, seed=3), BIAS: np.zeros(3, "<f4")}, SEQ_CLS, "do not belong"),
        (head(2, seed=3), {"task_type": "SEQ_CLS", "id2label": {"0": "a"}}, "names 1 labels"),
        (head(2, seed=3), {"task_type": "SEQ_CLS", "id2label": {"0": "a", "2": "b"}}, "id2label"),
        (head(2, seed=3), {"task_type": "SEQ_CLS", "id2label": ["a", "b"]}, "id2label"),
        (head(2, seed=3), {"task_type": "SEQ_CLS", "problem_type": "ranking"}, "problem_type"),
        (head(2, seed=3), {"task_type": "TOKEN_CLS"}, "'TOKEN_CLS' is not served"),
        ({}, {"classifier_from_token": ["yes"]}, "classifier_from_token"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_uploads_with_wrong_heads_are_refused(
    server: Server, checkpoints: Checkpoints, tensors: dict[str, np.ndarray], fields: dict[str, Any], words: str
) -> None:
    answer = server.post("/v1/adapters", data={"name": "wrong"}, files=files_of(checkpoints, tensors, **fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in json.dumps([error["message"], error.get("problems")], ensure_ascii=False), answer.text


def test_the_digest_covers_the_head_and_its_labels(server: Server, checkpoints: Checkpoints) -> None:
    seen = set()
    for tensors, labels in ((head(2, seed=3), None), (head(2, seed=4), None), (head(2, seed=3), {"0": "a", "1": "b"})):
        fields = {} if labels is None else {"id2label": labels}
        files = files_of(checkpoints, tensors, task_type="SEQ_CLS", **fields)
        answer = server.post("/v1/adapters", data={"name": "kept"}, files=files)
        assert answer.status_code == 201, answer.text
        seen.add(answer.json()["digest"])
        server.http.delete(f"{server.url}/v1/adapters/kept")
    assert len(seen) == 3


def test_a_head_that_overflows_is_the_adapter_s_fault(server: Server, checkpoints: Checkpoints) -> None:
    tensors = {WEIGHT: np.full((1, _HIDDEN), 3e38, "<f4") * np.sign(head(1, seed=5)[WEIGHT])}
    files = files_of(checkpoints, tensors, task_type="SEQ_CLS")
    assert server.post("/v1/adapters", data={"name": "huge"}, files=files).status_code == 201
    try:
        answer = server.post("/classify", json={"model": "huge", "input": QUERY})
        assert (answer.status_code, "finite" in answer.text) == (400, True), answer.text
    finally:
        server.http.delete(f"{server.url}/v1/adapters/huge")
