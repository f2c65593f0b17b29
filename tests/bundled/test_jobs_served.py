"""The bundled adapters at work: all held-out cases of all jobs, and the base on the same prompts, in one batch call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from examples.bundled_jobs import HELD_OUT_CASES, JOBS, Job, held_out_cases
from examples.train_base import BASE_DIR
from tests.support.http.server import Server, running_server

NUM_ITEMS = HELD_OUT_CASES * (len(JOBS) + 1)
MAX_TOKENS = 96


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Server]:
    """The bundled model with its bundled adapters, and room for all cases at once."""
    work_dir = tmp_path_factory.mktemp("bundled")
    with running_server(
        BASE_DIR,
        work_dir,
        max_batch_items=NUM_ITEMS,
        max_queued_requests=NUM_ITEMS,
        kv_bytes="32MiB",
        device=device,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, list[str]]:
    """By model name: what it answered to each prompt, in order. One batch, prompt by prompt, all models in turn."""
    assert HELD_OUT_CASES >= 200
    models = ["base", *(job.name for job in JOBS)]
    asked = [(model, prompt) for prompt, _ in held_out_cases(JOBS[0]) for model in models]
    items = [
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        for model, prompt in asked
    ]
    reply = httpx.post(f"{server.url}/v1/completions/batch", json={"items": items}, timeout=600)
    assert reply.status_code == 200, reply.text
    given: dict[str, list[str]] = {model: [] for model in models}
    for (model, _), item in zip(asked, reply.json()["items"], strict=True):
        assert "error" not in item, item
        given[model].append(item["choices"][0]["message"]["content"])
    return given


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_adapter_does_its_job_and_the_base_does_not(answers: dict[str, list[str]], job: Job) -> None:
    """At least nine of ten answers are exactly right; the base, asked the same, gives fewer than two of ten."""
    wanted = [answer for _, answer in held_out_cases(job)]
    right = {model: sum(a == b for a, b in zip(answers[model], wanted, strict=True)) for model in (job.name, "base")}
    assert right[job.name] >= 0.9 * len(wanted), right
    assert right["base"] < 0.2 * len(wanted), right


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_no_constant_answer_and_no_other_job_scores(answers: dict[str, list[str]], job: Job) -> None:
    """The best single output is right in under one of ten cases, and so are the answers of every other adapter."""
    wanted = [answer for _, answer in held_out_cases(job)]
    assert Counter(wanted).most_common(1)[0][1] <= 0.1 * len(wanted)
    for other in JOBS:
        if other is not job:
            assert sum(a == b for a, b in zip(answers[other.name], wanted, strict=True)) <= 0.1 * len(wanted)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_answer_depends_on_every_word_of_the_prompt(job: Job) -> None:
    """Another word in any one place of the prompt gives another right answer."""
    for prompt, answer in held_out_cases(job):
        words = prompt.split()
        for place in range(len(words)):
            assert job.answer([*words[:place], "zigzag", *words[place + 1 :]]) != answer


def test_the_batch_mixed_all_adapters(server: Server, answers: dict[str, list[str]]) -> None:
    """There were steps with more than two of the four adapters in them, as far as the histogram tells them apart."""
    assert answers
    assert 'multilora_step_adapters_bucket{le="2.0"}' in server.get("/metrics").text
    steps = server.metric("step_adapters_bucket", le="+Inf") - server.metric("step_adapters_bucket", le="2.0")
    assert steps > 0
