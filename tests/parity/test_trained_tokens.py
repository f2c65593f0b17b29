"""Trained tokens beside an embedding or a head that were trained whole, or that PEFT has saved with them, against
transformers + PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from adapters.errors import BindingError
from adapters.store.store import AdapterStore
from service.models.layouts import layout_in
from tests.support.engine.engine_parity import (
    BASE,
    Oracle,
    Request,
    World,
    assert_greedy,
    build_engine,
    config_of,
    make_requests,
    run_engine,
)
from tests.support.models.tiny_models import load_oracle, make_adapter, make_tiny_model
from tests.tolerances import LOGITS

IDS = [5, 9, 30]
KINDS: dict[str, dict[str, Any]] = {
    "tokens": {"trainable_token_indices": IDS},
    "tokens-beside-norms": {"trainable_token_indices": IDS, "modules_to_save": ["model.norm"]},
    "saved-with-the-base": {"trainable_token_indices": IDS, "save_embedding_layers": True},
    "of-the-head-beside-a-whole-embedding": {
        "trainable_token_indices": {"lm_head": [9, 40]},
        "modules_to_save": ["embed_tokens"],
    },
}
BESIDE_WHOLE_HEAD: dict[str, Any] = {"trainable_token_indices": IDS, "modules_to_save": ["lm_head"]}


def assert_equal_to_peft(world: World, oracle: Oracle) -> None:
    """Greedy tokens and their log probabilities, of prompts with and without the trained tokens, in mixed steps."""
    requests = make_requests(world, 2 * (len(world.adapters) + 1))
    requests += [Request(f"trained {name}", name, (7, 5, 20, 9, 40, 30), 6) for name in world.adapters]
    engine = build_engine(config_of(world, token_budget=24, max_sequences=8, side_bytes=4 << 20))
    answers = run_engine(engine, [request.submit(world, logprobs=1) for request in requests], joins_per_step=3)
    engine.close()
    for request in requests:
        answer = answers[request.name]
        assert_greedy(oracle, request, answer.tokens)
        logits = oracle.logits(request.adapter, [*request.prompt, *answer.tokens])[len(request.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).max(-1).values.tolist()
        found = [entry.logprob for entry in answer.logprobs]
        assert found == pytest.approx(expected, abs=LOGITS[world.dtype]), request.name


def published(family: str, model_dir: Path, adapters: dict[str, Path], directory: Path, device: str) -> World:
    digests, rows = {}, {}
    store = AdapterStore(directory / "store", layout_in(model_dir), base_name=BASE, base_dir=model_dir)
    for name, adapter_dir in adapters.items():
        with store.begin() as upload:
            upload.add_directory(adapter_dir)
            manifest = upload.finish(name)[0].manifest
        digests[name], rows[name] = manifest.digest, manifest.rows
    store.close()
    return World(family, torch.float32, device, model_dir, directory / "store", adapters, digests, rows)


def adapters_of(model_dir: Path, directory: Path, kinds: dict[str, dict[str, Any]]) -> dict[str, Path]:
    return {
        name: make_adapter(model_dir, directory / name, seed=seed, rank=2, target_modules=["q_proj"], **kind)
        for seed, (name, kind) in enumerate(kinds.items(), start=1)
    }


@pytest.mark.parametrize("family", ["qwen2", "llama"], ids=["tied", "untied"])
def test_trained_tokens_equal_peft_whatever_else_was_saved(family: str, tmp_path: Path, device: str) -> None:
    model_dir = make_tiny_model(family, tmp_path / "model")
    is_tied = layout_in(model_dir).ties_head
    assert is_tied == (family == "qwen2")
    kinds = KINDS | ({} if is_tied else {"beside-a-whole-head": BESIDE_WHOLE_HEAD})
    world = published(family, model_dir, adapters_of(model_dir, tmp_path, kinds), tmp_path, device)
    assert_equal_to_peft(world, Oracle(world))


def test_a_head_that_was_untied_to_be_trained_is_served_beside_trained_tokens(tmp_path: Path, device: str) -> None:
    """They are the embedding's alone then. The truth is the untied copy, for PEFT cannot have both in one that ties."""
    model_dir, untied_dir = make_tiny_model("qwen2", tmp_path / "model"), tmp_path / "untied"
    untied = load_oracle(model_dir, torch.float32)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    untied.config.tie_word_embeddings = False
    untied.save_pretrained(untied_dir)
    adapters = adapters_of(untied_dir, tmp_path, {"beside-a-whole-head": BESIDE_WHOLE_HEAD})
    world = published("qwen2", model_dir, adapters, tmp_path, device)
    assert world.rows["beside-a-whole-head"].keys() == {"attention", "embeddings", "saved_head"}
    assert_equal_to_peft(world, Oracle(replace(world, model_dir=untied_dir)))


def test_what_peft_cannot_run_is_refused_with_what_to_do(tmp_path: Path, device: str) -> None:
    """It puts trained tokens around the saved head of a base that ties it, and refuses that layer when it runs."""
    model_dir = make_tiny_model("qwen2", tmp_path / "model")
    adapters = adapters_of(model_dir, tmp_path, {"x": BESIDE_WHOLE_HEAD})
    peft_model = PeftModel.from_pretrained(load_oracle(model_dir, torch.float32), adapters["x"])
    with pytest.raises(ValueError, match="unknown layer type"):
        peft_model(torch.tensor([[7, 20]]))
    with pytest.raises(BindingError, match=r"lm_head.*PEFT cannot run.*leave lm_head out.*or save both whole"):
        published("qwen2", model_dir, adapters, tmp_path, device)
