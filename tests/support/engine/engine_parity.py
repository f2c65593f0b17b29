"""A tiny model with eight adapters in a store, requests over all of them, and what transformers + PEFT say to each.

The oracle judges a whole answer in one forward pass: greedy output is right if each of its tokens is the argmax after
the prompt and the tokens before it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from adapters.peft.config import invocation_start
from adapters.row_plan import plan_rows
from adapters.store.store import AdapterStore
from kernels.sampling.parameters import ScoredToken
from service.engine.engine import Engine
from service.engine.ipc.config import EngineConfig, EngineOptions
from service.engine.ipc.messages import Finished, Sampling, Submit, Tokens
from service.engine.loras.interfaces import Loader
from service.engine.process import compile_kernels
from service.engine.startup import build
from service.models.families import model_spec
from service.models.layers.caches import kv_bytes_per_token
from service.models.layouts import layout_in
from service.models.spec.config_json import read_config
from tests.support.engine.stepped_loader import PromptLoader
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import (
    ATTENTION_INPUTS,
    ATTENTION_OUTPUT,
    LINEAR_MODULES,
    MLP_MODULES,
    VOCAB_SIZE,
    load_oracle,
    make_adapter,
    make_tiny_model,
)

BASE = "base"
BLOCK_SIZE = 4
# Every way to choose a token, and to be told of probabilities.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 0.8, "top_k": 5, "min_p": 0.05, "seed": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0}, "min_tokens": 2, "ignore_eos": False},
    {"allowed_tokens": b"\xff" * 20, "bad_words": ((7,), (8, 9))},
    {"logprobs": 3, "prompt_logprobs": 2},
)


@dataclass(frozen=True)
class Request:
    """`adapter`: a name of `World.adapters`, or BASE."""

    name: str
    adapter: str
    prompt: tuple[int, ...]
    max_tokens: int

    def submit(self, world: World, **sampling: Any) -> Submit:
        fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": self.max_tokens} | sampling
        digest, rows, start = world.digests.get(self.adapter), world.rows.get(self.adapter, {}), 0
        if invocation := world.invocations.get(self.adapter):
            found = invocation_start(self.prompt, invocation)
            digest, rows, start = (None, {}, 0) if found is None else (digest, rows, found)
        return Submit(self.name, self.prompt, Sampling(**fields), digest, rows, adapter_start=start)


@dataclass
class Answer:
    """What the engine said to one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: tuple[ScoredToken | None, ...] = ()
    ended: Finished | None = None


@dataclass(frozen=True)
class World:
    """The model, its adapters on disk (PEFT's own directories) and in the store.

    device  that engines run on; the oracle computes on the CPU
    """

    family: str
    dtype: torch.dtype
    device: str
    model_dir: Path
    store_root: Path
    adapters: dict[str, Path]
    digests: dict[str, str]
    rows: dict[str, dict[str, int]]
    invocations: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def tied_targets(self) -> set[str]:
        """Adapters of the embedding or the head of a model that ties them: PEFT's merged weights mix the two up."""
        tied = model_spec(read_config(self.model_dir)).tie_word_embeddings
        return {"head", "embedding"} if tied else set()


def adapter_specs(family: str) -> dict[str, dict[str, Any]]:
    """Mixed ranks and targets: everything, single groups, one projection, the head, the embedding, patterns."""
    linear = LINEAR_MODULES[family]
    inputs, output, mlp = ATTENTION_INPUTS[family], ATTENTION_OUTPUT[family], MLP_MODULES[family]
    return {
        "all": {"rank": 8, "target_modules": linear},
        "attention": {"rank": 4, "target_modules": [inputs[0], inputs[-1]]},
        "mlp": {"rank": 16, "target_modules": mlp or inputs[1:]},
        "one": {"rank": 1, "target_modules": [output]},
        "head": {"rank": 6, "target_modules": ["lm_head", inputs[0]]},
        "embedding": {"rank": 5, "target_modules": ["embed_tokens", inputs[-1]]},
        "rs": {"rank": 32, "target_modules": linear, "use_rslora": True, "lora_alpha": 8},
        "pattern": {
            "rank": 3,
            "target_modules": linear,
            "rank_pattern": {inputs[0]: 12},
            "alpha_pattern": {(*inputs, output)[2 if len(inputs) == 3 else 1]: 5},
            "layers_to_transform": [0, 1],
        },
    }


def make_world(
    family: str,
    directory: Path,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    specs: dict[str, dict[str, Any]] | None = None,
    make_model: Callable[..., Path] = make_tiny_model,
    **overrides: Any,
) -> World:
    """Write the model and its adapters, and publish them as an upload would. specs: None are `adapter_specs`."""
    model_dir = make_model(family, directory / "model", dtype=dtype, **overrides)
    layout = layout_in(model_dir)
    adapters, digests, rows, invocations = {}, {}, {}, {}
    store = AdapterStore(directory / "store", layout, base_name=BASE, base_dir=model_dir)
    for seed, (name, spec) in enumerate((specs or adapter_specs(family)).items(), start=1):
        adapters[name] = make_adapter(model_dir, directory / name, seed=seed, **spec)
        upload = store.begin()
        upload.add_directory(adapters[name])
        record, _ = upload.finish(name)
        digests[name], rows[name] = record.digest, record.manifest.rows
        invocations[name] = record.manifest.invocation
    store.close()
    return World(family, dtype, device, model_dir, directory / "store", adapters, digests, rows, invocations)


def make_requests(world: World, num: int = 24, *, seed: int = 0, max_prompt: int = 60) -> list[Request]:
    """Requests over the base and all adapters in turn; the first round asks all of them the same."""
    rng = random.Random(seed)
    names = [BASE, *world.adapters]
    shared = tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(20))
    requests = []
    for i in range(num):
        prompt = tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randint(1, max_prompt)))
        prompt = shared if i < len(names) else prompt
        requests.append(Request(f"r{i}", names[i % len(names)], prompt, rng.randint(8, 20)))
    return requests


def config_of(
    world: World, *, num_blocks: int = 400, num_rows: int = 128, num_embedding_rows: int | None = None, **fields: Any
) -> EngineConfig:
    """An engine of `num_blocks` KV blocks and at least `num_rows` rows in each group (None: in that of the embeddings
    too)."""
    spec = model_spec(read_config(world.model_dir))
    layout = layout_in(world.model_dir)
    row_bytes, wanted = 2**13, dict.fromkeys(layout.groups, num_rows)
    wanted["embeddings"] = num_embedding_rows or num_rows
    while any(num < wanted[group] for group, num in plan_rows(layout, row_bytes, element_bytes=4).rows.items()):
        row_bytes = row_bytes * 9 // 8
    return EngineConfig(
        model_dir=str(world.model_dir),
        store_root=str(world.store_root),
        device=world.device,
        dtype=str(world.dtype).removeprefix("torch."),
        block_size_tokens=BLOCK_SIZE,
        kv_bytes=num_blocks * BLOCK_SIZE * kv_bytes_per_token(spec, world.dtype),
        row_bytes=row_bytes,
        host_tier_bytes=64 * 2**20,
        **fields,
    )


def run_engine(engine: Engine, submits: Sequence[Submit], *, joins_per_step: int | None = None) -> dict[str, Answer]:
    """All answers, with everything's integrity checked after every step. Closes nothing.

    joins_per_step  submit so many before each step; None: all at once
    """
    answers = {submit.request_id: Answer() for submit in submits}
    left = list(submits)
    while left or engine.num_requests:
        count = len(left) if joins_per_step is None else joins_per_step
        for submit in left[:count]:
            engine.submit(submit)
        left = left[count:]
        engine.wake.clear()
        events = engine.step()
        engine.check_integrity()
        for event in events:
            if isinstance(event, Tokens):
                answer = answers[event.request_id]
                answer.tokens.extend(event.token_ids)
                answer.logprobs.extend(event.logprobs)
                answer.prompt_logprobs = event.prompt_logprobs or answer.prompt_logprobs
            elif isinstance(event, Finished):
                answers[event.request_id].ended = event
        if engine.num_requests and engine.is_idle:
            assert engine.wake.wait(LIMIT_SECONDS), "nothing can run, and no load ends"
    return answers


def build_engine(options: EngineOptions, *, loader: Loader | None = None, **others: Any) -> Engine:
    """The engine of these tests. On a device it is ready, as one that serves: its steps compile nothing.

    loader  None: adapters are read at once, so that steps depend on nothing but the requests
    """
    engine = build.build_engine(options, loader=loader or PromptLoader(), **others)
    if engine.capacity.device.type != "cpu":
        compile_kernels(engine)
    return engine


def submit_every_sampling(engine: Engine, world: World) -> None:
    """Have two adapters on the device; then submit, and do not run, a request of three tokens for each of SAMPLINGS."""
    first = [Request(f"first {name}", name, (9, 8), 1) for name in ("all", "embedding")]
    run_engine(engine, [request.submit(world) for request in first])
    for i, sampling in enumerate(SAMPLINGS):
        request = Request(f"r{i}", (BASE, "all", "embedding")[i % 3], (5 + i, 9, 8, 7), 3)
        engine.submit(request.submit(world, **sampling))


def answers_of(world: World, requests: Sequence[Request], *, sampling: Any = None, **config: Any) -> dict[str, Answer]:
    """Answers of a fresh engine to all requests at once."""
    engine = build_engine(config_of(world, **config))
    try:
        return run_engine(engine, [request.submit(world, **(sampling or {})) for request in requests])
    finally:
        engine.close()


class Oracle:
    """transformers + PEFT, one model per adapter, unmerged and (on demand) merged."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._models: dict[tuple[str, bool], Any] = {}

    def logits(self, adapter: str, token_ids: Sequence[int], *, merged: bool = False) -> torch.Tensor:
        """float32 [len(token_ids), vocab]: logits after each prefix."""
        return self._run(adapter, token_ids, merged=merged).logits[0].float()

    def hidden(self, adapter: str, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [len(token_ids), hidden_size]: the hidden states behind the final norm."""
        return self._run(adapter, token_ids, output_hidden_states=True).hidden_states[-1][0].float()

    @torch.no_grad()
    def _run(self, adapter: str, token_ids: Sequence[int], *, merged: bool = False, **options: Any) -> Any:
        key = (adapter, merged)
        if key not in self._models:
            self._models[key] = self._load(adapter, merged)
        return self._models[key](torch.tensor([list(token_ids)]), use_cache=False, **options)

    def _load(self, adapter: str, merged: bool) -> Any:
        if merged:
            unmerged = self._models.get((adapter, False)) or self._load(adapter, False)
            return copy.deepcopy(unmerged).merge_and_unload()
        model = load_oracle(self._world.model_dir, self._world.dtype)
        if adapter != BASE:
            model = PeftModel.from_pretrained(model, self._world.adapters[adapter])
        return model.eval()


def assert_greedy(oracle: Oracle, request: Request, tokens: Sequence[int], *, merged: bool = False) -> None:
    """Each token of the answer is the oracle's most likely one after all before it."""
    assert len(tokens) == request.max_tokens
    logits = oracle.logits(request.adapter, [*request.prompt, *tokens], merged=merged)
    best = logits[len(request.prompt) - 1 : -1].argmax(-1).tolist()
    assert list(tokens) == best, f"{request.name} ({request.adapter}{', merged' if merged else ''})"
