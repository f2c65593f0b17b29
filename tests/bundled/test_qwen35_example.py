"""`examples/qwen3_5.py` with a tiny random Qwen3.5 under the published names, with a vision tower beside the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from examples import qwen3_5
from tests.support.http.server import Server, running_server
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.split_projections import PARTS, load_split
from tests.support.models.tiny_models import make_adapter, make_tokenizer, tiny_config

QUESTION = [{"role": "user", "content": "the end"}]
CONVERSATIONS = [
    [*QUESTION, {"role": "assistant", "content": "in the beginning"}],
    [{"role": "user", "content": "her"}, {"role": "assistant", "content": "and him"}],
]
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3_5")
    text = json.loads(tiny_config("qwen3_5_text").to_json_string(use_diff=False))
    config = transformers.Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(directory)
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def adapter_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    with torch.random.fork_rng():
        torch.manual_seed(6)
        qwen3_5.train(model_dir, CONVERSATIONS, directory, rank=4, num_epochs=4, learning_rate=3e-2)
    return directory


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(model_dir, tmp_path_factory.mktemp("server")) as running:
        yield running


def test_the_checkpoint_is_as_published(model_dir: Path) -> None:
    names = list(load_file(model_dir / "model.safetensors"))
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in names
    assert any(name.startswith("model.visual.") for name in names)


def peft_answers(base: Any, model_dir: Path, adapter_dir: Path) -> tuple[str, str]:
    """Of the model without and with the adapter, greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    asked = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    token_ids = torch.tensor([tokenizer(asked, add_special_tokens=False)["input_ids"]])

    def greedy(model: torch.nn.Module) -> str:
        with torch.inference_mode():
            out = model.generate(input_ids=token_ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
        text: str = tokenizer.decode(out[0, token_ids.shape[1] :], skip_special_tokens=True)
        return text

    plain = greedy(base)
    return plain, greedy(PeftModel.from_pretrained(base, adapter_dir).eval())


def test_the_adapter_answers_as_it_does_in_peft(server: Server, model_dir: Path, adapter_dir: Path) -> None:
    qwen3_5.upload(adapter_dir, "mine", server.url)
    answer = qwen3_5.ask("mine", QUESTION, server.url, max_tokens=12)
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    plain, adapted = peft_answers(base, model_dir, adapter_dir)
    assert answer == adapted != plain


def test_an_adapter_of_queries_keys_and_values_apart_answers_as_it_does_in_peft(
    server: Server, model_dir: Path, tmp_path: Path
) -> None:
    """Of the whole model's class, whose in_proj_qkv are three modules each."""
    directory = make_adapter(
        model_dir,
        tmp_path / "split",
        rank=4,
        target_modules=rf".*language_model.*\.({'|'.join(PARTS)}|in_proj_b)",
        rank_pattern={"in_proj_k": 7},
        alpha_pattern={"in_proj_v": 20},
        seed=7,
        load=load_split,
    )
    qwen3_5.upload(directory, "split", server.url)
    answer = qwen3_5.ask("split", QUESTION, server.url, max_tokens=12)
    plain, adapted = peft_answers(load_split(model_dir, torch.float32), model_dir, directory)
    assert answer == adapted != plain


def test_images_are_refused(server: Server) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    asked = {"model": "base", "messages": [{"role": "user", "content": parts}]}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=LIMIT_SECONDS)
    assert reply.status_code == 400
    assert "images, audio and files are not supported" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("model.visual.blocks.0.attn.qkv", "changes visual alone"),
        ("model.language_model.layers.0.linear_attn.conv1d", "model.language_model.layers.0.linear_attn.conv1d"),
    ],
    ids=["tower", "convolution"],
)
def test_adapters_of_what_is_not_adapted_are_refused_by_name(
    module: str, named: str, server: Server, adapter_dir: Path, tmp_path: Path
) -> None:
    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    config["target_modules"] = [module.rsplit(".", 1)[-1]]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    sides = {"A": torch.ones(4, 16), "B": torch.ones(48, 4)}
    tensors = {f"base_model.model.{module}.lora_{side}.weight": tensor for side, tensor in sides.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(httpx.HTTPStatusError) as caught:
        qwen3_5.upload(tmp_path, "wrong", server.url)
    assert caught.value.response.status_code == 400
    assert named in caught.value.response.json()["error"]["message"]
