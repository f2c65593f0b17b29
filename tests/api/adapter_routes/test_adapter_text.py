"""Adapters that bring a tokenizer's files: their prompts are those that transformers makes of their directories, and
their answers end at their own end tokens."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import peft
import pytest
import torch
import transformers

from service.cli.main import main
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, running_server
from tests.support.http.uploads import parts_of

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "more"}]
TEMPLATE = (
    "{{ bos_token or '' }}{% for one in messages %}[{{ one.role }}] {{ one.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
NAMED = {
    "default": "plain {{ messages[-1].content }}",
    "tool_use": "<tools>{{ tools | tojson }}</tools> as <tool_call> {{ messages[-1].content }}{{ eos_token }}",
    "rag": "documents {{ messages[-1].content }}",
}
END = "<|im_end|>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
Save = Callable[..., Path]


@pytest.fixture
def save(checkpoints: Checkpoints, tmp_path: Path) -> Save:
    """Writes an adapter with the tokenizer that its training saved: a directory of that name."""

    def save(name: str, template: Any = TEMPLATE, config: dict[str, Any] | None = None, **tokens: str) -> Path:
        shutil.copytree(checkpoints.spare, tmp_path / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints.base)
        for role, text in tokens.items():
            setattr(tokenizer, role, text)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
        path = tmp_path / name / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
        return tmp_path / name

    return save


@pytest.fixture
def send(server: Server) -> Iterator[Callable[..., dict[str, Any]]]:
    """Uploads a directory as `multilora upload` does; returns the load report."""
    names = []

    def send(directory: Path, *options: str) -> dict[str, Any]:
        names.append(directory.name)
        assert main(["upload", str(directory), f"--url={server.url}", *options]) == 0
        report: dict[str, Any] = server.get(f"/v1/adapters/{directory.name}").json()
        return report

    yield send
    for name in names:
        server.http.delete(f"{server.url}/v1/adapters/{name}")


def prompt(server: Server, model: str, **fields: Any) -> str:
    answer = server.post("/tokenize", json={"model": model, "messages": CHAT, **fields})
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["tokens"]
    return str(server.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


def wanted(directory: Path, **options: Any) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return str(tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **options))


@pytest.mark.parametrize(
    ("template", "config", "tokens"),
    [
        (TEMPLATE, {}, {}),
        (TEMPLATE, {}, {"eos_token": END}),
        (TEMPLATE, {}, {"bos_token": "<|im_start|>", "eos_token": END}),
        (TEMPLATE, {"bos_token": None}, {}),
        ("{{ bos_token is defined }}" + TEMPLATE, {"bos_token": "", "pad_token": ""}, {}),
        (TEMPLATE, {"bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "lstrip": False}}, {}),
        ("{{ pad_token }}" + TEMPLATE, {}, {"pad_token": "</s>"}),
        ("{{ unk_token }}" + TEMPLATE, {}, {"unk_token": END}),
        ("{{ turn_token }}" + TEMPLATE, {"extra_special_tokens": {"turn_token": END}}, {}),
        ("{{ turn_token }}" + TEMPLATE, {"turn_token": END}, {}),
    ],
)
def test_a_template_is_rendered_with_the_adapters_own_special_tokens(
    server: Server,
    save: Save,
    send: Callable[..., dict[str, Any]],
    template: str,
    config: dict[str, Any],
    tokens: dict[str, str],
) -> None:
    directory = save("own-tokens", template, config, **tokens)
    send(directory)
    assert prompt(server, "own-tokens") == wanted(directory)
    info = server.get("/tokenizer_info", params={"model": "own-tokens"}).json()
    made = transformers.AutoTokenizer.from_pretrained(directory)
    assert (info["chat_template"], info["eos_token"]) == (template, made.eos_token)


def test_the_bases_template_is_rendered_with_the_adapters_special_tokens(
    server: Server, save: Save, send: Callable[..., dict[str, Any]], checkpoints: Checkpoints
) -> None:
    """Where the adapter brings a tokenizer and no template: it was trained with the base's."""
    directory = save("no-template", None, bos_token=END)
    send(directory)
    base = transformers.AutoTokenizer.from_pretrained(checkpoints.base).chat_template
    assert "bos_token" in base
    assert prompt(server, "no-template") == wanted(directory, chat_template=base)


def as_list(directory: Path) -> None:
    """As older versions of transformers save named templates."""
    shutil.rmtree(directory / "additional_chat_templates")
    (directory / "chat_template.jinja").unlink()
    path = directory / "tokenizer_config.json"
    listed = [{"name": name, "template": source} for name, source in NAMED.items()]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": listed}))


@pytest.mark.parametrize("arrange", [None, as_list], ids=["files", "list"])
@pytest.mark.parametrize("way", ["command", "archive", "parts"])
def test_named_templates_of_an_adapter_are_chosen_as_transformers_chooses(
    server: Server, save: Save, send: Callable[..., dict[str, Any]], way: str, arrange: Callable[[Path], None] | None
) -> None:
    directory = save("named", NAMED, eos_token=END)
    if arrange is not None:
        arrange(directory)
    if way == "command":
        send(directory)
    else:
        files: dict[str, Any] = dict(parts_of(directory))
        if way == "archive":
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w:gz") as archive:
                archive.add(directory, "some/folder")
            files = {"archive": ("named.tar.gz", packed.getvalue())}
        else:
            for path in (*directory.glob("tokenizer_config.json"), *directory.rglob("*.jinja")):
                files[str(path.relative_to(directory))] = (path.name, path.read_bytes())
        server.http.put(f"{server.url}/v1/adapters/named", files=files).raise_for_status()
    tools = [TOOL]
    try:
        assert prompt(server, "named") == wanted(directory)
        assert prompt(server, "named", tools=tools) == wanted(directory, tools=tools)
        assert prompt(server, "named", chat_template_name="rag") == wanted(directory, chat_template="rag")
        named = {"chat_template_name": "default", "chat_template_kwargs": {"tools_are": "left out"}}
        assert prompt(server, "named", **named) == wanted(directory, chat_template="default")
        refused = server.post("/tokenize", json={"model": "named", "messages": CHAT, "chat_template_name": "none"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_name")
        assert "'default', 'rag', 'tool_use'" in refused.json()["error"]["message"]
        info = server.get("/tokenizer_info", params={"model": "named"}).json()
        others = {name: source for name, source in NAMED.items() if name != "default"}
        assert (info["chat_template"], info["additional_chat_templates"]) == (NAMED["default"], others)
        body = {"model": "named", "input": "more", "chat_template_name": "nobody's", "max_output_tokens": 1}
        assert server.post("/v1/responses", json=body).json()["error"]["param"] == "chat_template_name"
    finally:
        server.http.delete(f"{server.url}/v1/adapters/named")


def test_named_templates_of_a_base_and_of_what_it_preloads_are_chosen_as_transformers_chooses(
    checkpoints: Checkpoints, tmp_path: Path, save: Save
) -> None:
    base, preloaded = tmp_path / "base", tmp_path / "preloaded"
    preloaded.mkdir()
    own = {name: source.replace("content", "content | upper") for name, source in NAMED.items()}
    directories = [save(name, own).rename(preloaded / name) for name in ("files", "list")]
    as_list(directories[1])
    shutil.copytree(checkpoints.base, base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = NAMED
    tokenizer.save_pretrained(base)
    tools = [TOOL]
    with running_server(base, tmp_path / "server", model_name=BASE, preload_adapters_dir=preloaded) as server:
        for model, directory in ((BASE, base), *((one.name, one) for one in directories)):
            assert prompt(server, model) == wanted(directory)
            assert prompt(server, model, tools=tools) == wanted(directory, tools=tools)
            assert prompt(server, model, chat_template_name="rag") == wanted(directory, chat_template="rag")


class TestEnds:
    """Answers whose most likely token is always the adapter's end token, which is none of the base's."""

    @pytest.fixture
    def name(self, save: Save, send: Callable[..., dict[str, Any]]) -> str:
        report = send(save("ends", eos_token=END))
        assert report["eos_token_ids"] == [4]
        assert any(repr(END) in note and "(4)" in note for note in report["notes"])
        return "ends"

    def test_every_endpoint_ends_there(self, client: openai.OpenAI, server: Server, name: str) -> None:
        likely: Any = {"logit_bias": {"4": 100}, "temperature": 0, "max_tokens": 6}

        def ends(model: str, **fields: Any) -> list[tuple[int, str, Any]]:
            body = {"model": model, **likely, **fields}
            answers = [
                client.completions.create(prompt="a", **_split(body)),
                client.chat.completions.create(messages=[{"role": "user", "content": "a"}], **_split(body)),
            ]
            item = {**body, "prompt": "a"}
            batch = server.post("/v1/completions/batch", json={"items": [item]}).json()["items"][0]
            found = [(one.usage.completion_tokens, one.choices[0].finish_reason) for one in answers if one.usage]
            found.append((batch["usage"]["completion_tokens"], batch["choices"][0]["finish_reason"]))
            assert all(getattr(one.choices[0], "stop_reason", None) is None for one in answers)
            return found

        assert ends(name) == [(1, "stop")] * 3
        assert ends(BASE) == [(6, "length")] * 3
        assert ends(name, ignore_eos=True) == [(6, "length")] * 3
        assert ends(name, min_tokens=3) == [(4, "stop")] * 3
        body = {"model": name, "input": "a", "temperature": 0, "max_output_tokens": 6, "logit_bias": {"4": 100}}
        answer = server.post("/v1/responses", json=body).json()
        assert (answer["status"], answer["usage"]["output_tokens"]) == ("completed", 1)

    def test_a_grammar_may_end_there_too(self, server: Server, name: str) -> None:
        body = {"model": name, "prompt": "a", "structured_outputs": {"regex": "[ab]+"}, "max_tokens": 6}
        answer = server.post("/v1/completions", json={**body, "logit_bias": {"4": 100}, "temperature": 0}).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (2, "stop")
        assert answer["choices"][0]["text"] in ("a", "b")


def _split(body: dict[str, Any]) -> dict[str, Any]:
    """Fields of OpenAI's client, and beside them those that it does not know."""
    ours = ("ignore_eos", "min_tokens")
    return {name: one for name, one in body.items() if name not in ours} | {
        "extra_body": {name: one for name, one in body.items() if name in ours}
    }


class TestVocabulary:
    def test_what_only_pads_is_no_change(
        self, server: Server, save: Save, send: Callable[..., dict[str, Any]], checkpoints: Checkpoints
    ) -> None:
        """As Unsloth saves it; the prompt is the one of the saved tokenizer."""
        directory = save("pads")
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        tokenizer.add_special_tokens({"pad_token": "<|PAD_TOKEN|>"})
        assert len(tokenizer) == len(transformers.AutoTokenizer.from_pretrained(checkpoints.base)) + 1
        tokenizer.save_pretrained(directory)
        assert any("'<|PAD_TOKEN|>'" in note for note in send(directory)["notes"])
        assert prompt(server, "pads") == wanted(directory)

    @pytest.mark.parametrize("multiple", [None, 64])
    @pytest.mark.parametrize("saved", [["embed_tokens", "lm_head"], None])
    def test_rows_of_padding_tokens_are_left_out(
        self,
        saved: list[str] | None,
        multiple: int | None,
        server: Server,
        send: Callable[..., dict[str, Any]],
        checkpoints: Checkpoints,
        tmp_path: Path,
    ) -> None:
        """As training saves them that resized the base for its padding token; answers are PEFT's. Without
        modules_to_save PEFT saves the base's own rows."""
        base = transformers.AutoModelForCausalLM.from_pretrained(checkpoints.base)
        num_tokens = base.config.vocab_size
        base.resize_token_embeddings(num_tokens + 1, pad_to_multiple_of=multiple, mean_resizing=False)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and parameter.shape[0] < 4096:
                    parameter += 0.05 * torch.randn_like(parameter) * ("lora_B" in name or "modules_to_save" in name)
        directory = tmp_path / "resized"
        model.save_pretrained(directory, save_embedding_layers=True)
        for tokens in ({}, {"<|tool|>": num_tokens}):
            (directory / "added_tokens.json").write_text(json.dumps(tokens))
            with pytest.raises(AssertionError):
                send(directory)
        (directory / "added_tokens.json").write_text(json.dumps({"<|PAD_TOKEN|>": num_tokens}))
        notes = send(directory)["notes"]
        assert sum("rows of base_model" in note and "padding tokens" in note for note in notes) == (
            6 if saved else 2
        ), notes
        prompt_ids = torch.tensor([[5, 6, 7, 8]])
        spare = list(range(num_tokens, base.config.vocab_size))  # which random rows may prefer
        asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "suppress_tokens": spare}
        truth = model.eval().generate(input_ids=prompt_ids, **asked)
        body = {"model": "resized", "prompt": prompt_ids[0].tolist(), "max_tokens": 12, "temperature": 0}
        answer = server.post("/v1/completions", json={**body, "return_token_ids": True}).json()
        assert answer["choices"][0]["token_ids"] == truth[0, 4:].tolist()

    def test_the_tokenizer_can_be_left_at_home(
        self, save: Save, send: Callable[..., dict[str, Any]], server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        directory = save("adds")
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        tokenizer.add_tokens(["<|tool|>"])
        tokenizer.save_pretrained(directory)
        (directory / "README.md").write_text("trained well")
        assert main(["upload", str(directory), f"--url={server.url}"]) == 1
        said = capsys.readouterr().err
        assert "'<|tool|>'" in said
        assert "leave out tokenizer.json and tokenizer_config.json" in said
        assert "--without-tokenizer" in said
        notes = send(directory, "--without-tokenizer")["notes"]
        assert [note.split(" was left out")[0] for note in notes] == [
            f"The file {name}" for name in ("tokenizer_config.json", "tokenizer.json")
        ]
        assert "Not sent, since no server needs it: README.md." in capsys.readouterr().out
        assert prompt(server, "adds").startswith("<s>[user] hi</s>")
