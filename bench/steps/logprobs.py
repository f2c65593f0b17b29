"""How far a trainer's log probabilities of sampled tokens are from the server's, on the same weights.

python -m bench.steps.logprobs [--device cuda] [--model-dir DIR] [--dtype bfloat16] [--requests 64]
                               [--output-tokens 128] [--json FILE]

Samples at temperature 1 as the server does, all requests at once, then computes the same tokens with transformers in
the same dtype and in float32: mean and largest absolute difference, and that of transformers' two dtypes. With
--batch-invariant and without; where a device refuses it, without alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.shapes import BUNDLED
from kernels.platform import BackendError
from service.engine.engine import Engine
from service.engine.ipc.config import EngineOptions
from service.engine.ipc.messages import Finished, Sampling, Submit, Tokens
from service.engine.process import compile_kernels, warm_up
from service.engine.startup.build import build_engine

_PROMPTS = ("The river was", "I asked her why", "A short list of", "Seven people came to", "In the morning we")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.steps.logprobs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model-dir", type=Path, default=BUNDLED)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go too")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for is_invariant in (False, True):
        name = "batch-invariant" if is_invariant else "default"
        try:
            found[name] = _measure(arguments, is_invariant)
        except BackendError as error:
            found[name] = str(error)
        print(name, json.dumps(found[name]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def _measure(arguments: argparse.Namespace, is_invariant: bool) -> dict[str, Any]:
    options = EngineOptions(
        model_dir=str(arguments.model_dir),
        store_root="/nonexistent",
        dtype=arguments.dtype,
        device=arguments.device,
        row_bytes=0,
        batch_invariant=is_invariant,
        max_sequences=arguments.requests,
        kv_bytes=2**30,
    )
    engine = build_engine(options)
    compile_kernels(engine)
    engine.capture_steps()
    warm_up(engine)
    prompts = _prompts(arguments)
    started = time.perf_counter()
    sampled = _sampled(engine, prompts, arguments.output_tokens)
    seconds = time.perf_counter() - started
    engine.close()
    own = torch.cat([logprobs for _, logprobs in sampled])
    tokens = [(prompt, ids) for prompt, (ids, _) in zip(prompts, sampled, strict=True)]
    same, exact = (_trained(arguments, tokens, dtype) for dtype in (getattr(torch, arguments.dtype), torch.float32))
    return {
        "tokens": len(own),
        "seconds": round(seconds, 2),
        "transformers": _distance(own, same),
        "transformers in float32": _distance(own, exact),
        "transformers, its two dtypes": _distance(same, exact),
    }


def _prompts(arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_dir)
    texts = itertools.islice(itertools.cycle(_PROMPTS), arguments.requests)
    return [tuple(tokenizer(text)["input_ids"]) for text in texts]


def _sampled(engine: Engine, prompts: list[tuple[int, ...]], num_tokens: int) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and log probabilities of each request."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for index, prompt in enumerate(prompts):
        sampling = Sampling(temperature=1.0, seed=index, logprobs=0, max_tokens=num_tokens, ignore_eos=True)
        found[str(index)] = [], []
        engine.submit(Submit(str(index), prompt, sampling))
    while engine.num_requests:
        for event in engine.step():
            if isinstance(event, Tokens):
                found[event.request_id][0].extend(event.token_ids)
                found[event.request_id][1].extend(scored.logprob for scored in event.logprobs)
            assert not isinstance(event, Finished) or event.reason == "length", event
    return [(ids, torch.tensor(logprobs)) for ids, logprobs in found.values()]


@torch.inference_mode()
def _trained(
    arguments: argparse.Namespace, tokens: list[tuple[tuple[int, ...], list[int]]], dtype: torch.dtype
) -> torch.Tensor:
    """Log probabilities as a trainer computes them: a sequence in one forward pass, the logits in float32."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model_dir, dtype=dtype).to(arguments.device).eval()
    found = []
    for prompt, ids in tokens:
        whole = torch.tensor([[*prompt, *ids]], device=arguments.device)
        logits = model(input_ids=whole).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])[:, 0].cpu())
    return torch.cat(found)


def _distance(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    distance = (one - other).abs()
    return {"mean": float(f"{distance.mean():.2g}"), "largest": float(f"{distance.max():.2g}")}


if __name__ == "__main__":
    main()
