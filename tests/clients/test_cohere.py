"""Cohere's client ranks documents, by both of its interfaces."""

from __future__ import annotations

import pytest

from tests.support.blocks import run
from tests.support.http.client_environments import environment
from tests.support.http.server import Server
from tests.support.peft_files import adapter_files

pytestmark = pytest.mark.wide

RANKS = """
import os
import cohere

texts = ["a lamp", "the tiger in the moss", "", "moss"]
settings = {"api_key": "none", "base_url": os.environ["MULTILORA_URL"]}
asked = {"model": "judge", "query": "lamp tiger"}
client = cohere.ClientV2(**settings)
found = client.rerank(**asked, documents=texts, top_n=3)
scores = [one.relevance_score for one in found.results]
assert len(scores) == 3 and scores == sorted(scores, reverse=True) and 0 < scores[2] < scores[0] < 1, scores
assert found.meta.api_version.version == "2" and found.meta.tokens.input_tokens > 20, found.meta
older = cohere.Client(**settings).rerank(**asked, documents=[*texts[:3], {"text": texts[3]}], return_documents=True)
assert [one.index for one in older.results][:3] == [one.index for one in found.results]
assert all(one.document.text == texts[one.index] for one in older.results), older
try:
    client.rerank(model="shout", query="a", documents=["b"])
except cohere.errors.BadRequestError as error:
    print(error.body["error"]["message"])
"""


def test_cohere_ranks_documents(server: Server) -> None:
    program = environment("cohere") / "bin" / "python"
    files = adapter_files(1, num_labels=1)
    server.post("/v1/adapters", data={"name": "judge"}, files=files).raise_for_status()
    assert "no score head" in run([str(program), "-c", RANKS], server)
