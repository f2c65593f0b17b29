"""Frameworks of agents and of structured answers, each by its block of docs/clients.md and by its other ways to ask."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.blocks import blocks, run
from tests.support.http.client_environments import environment
from tests.support.http.server import Server
from tests.support.limits import LIMIT_SECONDS

pytestmark = pytest.mark.wide

PAGE = "docs/clients.md"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "HAYSTACK_TELEMETRY_ENABLED": "False"}
OFFLINE["OPENAI_TIMEOUT"] = str(LIMIT_SECONDS)  # haystack's own are 30 seconds
LAMP = re.compile(r"colour='?(red|green)'? on=(True|False)\n")
CALLED = "calculator 27 + 15\nThe answer is 42.\n"
# Both of OpenAI's APIs: an answer by schema, one by a tool of the framework's own, a tool, a stream.
PYDANTIC_AI = """
import os
from typing import Literal
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

class Lamp(BaseModel):
    colour: Literal["red", "green"]
    on: bool

provider = OpenAIProvider(base_url=os.environ["MULTILORA_URL"] + "/v1", api_key="none")
greedy = {"temperature": 0, "max_tokens": 200}
for api in (OpenAIChatModel, OpenAIResponsesModel):
    for form in (NativeOutput, ToolOutput):
        found = Agent(api("json", provider=provider), output_type=form(Lamp), model_settings=greedy).run_sync("lamp")
        assert isinstance(found.output, Lamp)
    agent = Agent(api("shout", provider=provider), model_settings=greedy)
    answer = agent.run_stream_sync("lamp tiger moss")
    assert "".join(answer.stream_text(delta=True)) == "LAMP TIGER MOSS!"
    assert answer.usage.output_tokens == 17, answer.usage
    agent = Agent(api("calculator", provider=provider), model_settings=greedy)

    @agent.tool_plain
    def calculator(expression: str) -> int:
        assert expression == "27 + 15"
        return 42

    assert agent.run_sync("What is 27 + 15?").output == "The answer is 42."
print("done")
"""
# Every mode in which the model needs no training for JSON.
INSTRUCTOR = """
import os
from typing import Literal
import instructor
from openai import OpenAI
from pydantic import BaseModel

class Lamp(BaseModel):
    colour: Literal["red", "green"]
    on: bool

client = OpenAI(base_url=os.environ["MULTILORA_URL"] + "/v1", api_key="none", max_retries=0)
asked = {"model": "json", "messages": [{"role": "user", "content": "lamp"}], "temperature": 0, "max_retries": 0}
for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    limit = "max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens"
    asking = instructor.from_openai(client, mode=instructor.Mode[mode])
    assert isinstance(asking.create(**asked, **{limit: 200}, response_model=Lamp), Lamp), mode
print("done")
"""
# Runs, streamed runs and answers by schema, with chats and with responses.
OPENAI_AGENTS = """
import asyncio, os
from typing import Literal
from agents import (
    Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
)
from openai import AsyncOpenAI
from pydantic import BaseModel

class Lamp(BaseModel):
    colour: Literal["red", "green"]
    on: bool

@function_tool
def calculator(expression: str) -> str:
    assert expression == "27 + 15"
    return "42"

async def main():
    client = AsyncOpenAI(base_url=os.environ["MULTILORA_URL"] + "/v1", api_key="none", max_retries=0)
    greedy = ModelSettings(temperature=0, include_usage=True)
    for api in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(name="sums", model=api("calculator", client), tools=[calculator], model_settings=greedy)
        run = Runner.run_streamed(agent, "What is 27 + 15?")
        raw = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
        text = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
        assert text == run.final_output == "The answer is 42.", text
        assert [event.type for event in raw].count("response.completed") == 2
        again = run.to_input_list() + [{"role": "user", "content": "What is 27 + 15?"}]
        assert (await Runner.run(agent, again)).final_output
        lamp = Agent(name="lamp", model=api("json", client), output_type=Lamp, model_settings=greedy)
        found = await Runner.run(lamp, "lamp")
        assert isinstance(found.final_output, Lamp) and found.context_wrapper.usage.output_tokens > 5

set_tracing_disabled(True)
asyncio.run(main())
print("done")
"""


def _said(client: str, heading: str, server: Server) -> str:
    (block,) = blocks(PAGE, heading, "python")
    return run([str(environment(client) / "bin" / "python"), "-c", block], server, **OFFLINE)


@pytest.mark.parametrize(
    ("client", "heading"),
    [("agents", "### pydantic-ai"), ("structured", "### instructor"), ("structured", "### DSPy")],
)
def test_an_answer_fits_a_schema(client: str, heading: str, server: Server) -> None:
    said = _said(client, heading, server)
    assert LAMP.fullmatch(said), said


def test_llama_index(server: Server) -> None:
    assert _said("structured", "### LlamaIndex", server) == "LAMP TIGER MOSS!\nLAMP TIGER MOSS!"


@pytest.mark.parametrize("heading", ["### openai-agents", "### haystack"])
def test_agents_call_a_tool(heading: str, server: Server) -> None:
    assert _said("agents", heading, server).rstrip() == CALLED.rstrip()


def test_smolagents(server: Server, tmp_path: Path) -> None:
    """From a file, since it reads a tool's source."""
    (block,) = blocks(PAGE, "### smolagents", "python")
    (tmp_path / "block.py").write_text(block.replace("http://127.0.0.1:8000", server.url))
    said = run([str(environment("agents") / "bin" / "python"), str(tmp_path / "block.py")], server, **OFFLINE)
    assert said == 'calculator {"expression": "27 + 15"}\n'


def test_llm(server: Server, tmp_path: Path) -> None:
    (block,) = blocks(PAGE, "### llm", "sh")
    path = f"{environment('agents') / 'bin'}:/usr/bin:/bin"
    # Two truth values: a sampled text might have more than any number of tokens.
    schema = 'llm --model shout --option max_tokens 200 --schema "lit bool, on bool" "lamp"'
    chat, structured = run(["bash", "-euc", f"{block}\n{schema}"], server, cwd=tmp_path, PATH=path).split("\n", 1)
    assert chat == "LAMP TIGER MOSS!"
    lamp = json.loads(structured)
    assert lamp.keys() == {"lit", "on"} and all(isinstance(value, bool) for value in lamp.values()), lamp


@pytest.mark.parametrize(
    ("client", "program"),
    [("agents", PYDANTIC_AI), ("structured", INSTRUCTOR), ("agents", OPENAI_AGENTS)],
    ids=["pydantic-ai", "instructor", "openai-agents"],
)
def test_other_ways_to_ask(client: str, program: str, server: Server) -> None:
    assert run([str(environment(client) / "bin" / "python"), "-c", program], server, **OFFLINE) == "done\n"
