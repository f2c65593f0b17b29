"""Compile the CUDA convolution without a GPU, and count the variants that calls of a layer need; prints JSON.

asserts            whether a prefill checks on the device that the starts begin at 0: without TRITON_DEBUG, with it
overlaps_launches  by compute capability: for each compiled program, whether it waits for the kernel before it
variants           by source, without and with block tables: how many variants many calls need, and which of them
                   `warm_up` does not make

Run as a script, without TRITON_INTERPRET: which of the two Triton is, is settled when it is imported.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from kernels.causal_conv1d import triton_ascend, triton_cuda
from kernels.causal_conv1d.call import ConvLaunch, PrefillCall, UpdateCall
from kernels.causal_conv1d.warm_up import warm_up_calls
from tests.support.ops.conv_checks import serving

BFLOAT16 = torch.bfloat16
# A layer of LFM2, and one with everything that a call may have.
LFM2: dict[str, Any] = {
    "weight": torch.zeros(3, 2048, dtype=BFLOAT16),
    "bias": None,
    "conv_states": torch.zeros(9, 2, 2048, dtype=BFLOAT16),
}
WIDE: dict[str, Any] = {
    "weight": torch.zeros(8, 129),
    "bias": torch.zeros(129),
    "conv_states": torch.zeros(9, 11, 129),
    "activation": "silu",
}


def specialised(
    launch: ConvLaunch, capability: int, *, debug: bool = False
) -> tuple[ASTSource, GPUTarget, dict[str, Any], str]:
    """The source of a launch as the just-in-time compiler specialises it, and its key in that compiler's cache."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {**launch.arguments, **launch.options, "debug": debug}
    bound, specialisation, options = binder(**given)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialisation, options)
    key = f"{kernel.__name__} {specialisation} {options}"
    return ASTSource(kernel, signature, constants, attributes), target, parsed.__dict__, key


def as_on_gpu(launch: ConvLaunch, capability: int) -> ConvLaunch:
    """The launch that a GPU's tensors would give."""
    depends = capability >= 90
    arguments = {**launch.arguments, "NATIVE": True, "DEPENDENT_LAUNCH": depends}
    return dataclasses.replace(launch, arguments=arguments, options={**launch.options, "launch_pdl": depends})


def plan(module: ModuleType, call: PrefillCall | UpdateCall) -> ConvLaunch:
    return module.plan_prefill(call) if isinstance(call, PrefillCall) else module.plan_update(call)


def overlaps_launches(capability: int, layers: list[dict[str, Any]]) -> list[bool]:
    """Compile what these layers warm up."""
    overlaps = []
    for layer in layers:
        for call in warm_up_calls(triton_cuda.WARM_UP_TOKENS, **layer):
            source, target, options, _ = specialised(as_on_gpu(plan(triton_cuda, call), capability), capability)
            compiled = triton.compile(source, target=target, options=options)
            assert compiled.asm["cubin"]
            overlaps.append("griddepcontrol" in compiled.asm["ptx"])
    return overlaps


def asserts(layer: dict[str, Any]) -> list[bool]:
    """Whether the program of a prefill can fail an assertion: as it is, and with TRITON_DEBUG=1."""
    prefill = as_on_gpu(plan(triton_cuda, next(warm_up_calls(triton_cuda.WARM_UP_TOKENS, **layer))), 90)
    programs = []
    for debug in (False, True):
        source, target, options, _ = specialised(prefill, 90, debug=debug)
        programs.append(triton.compile(source, target=target, options=options).asm["ptx"])
    return ["query_start_loc must start at 0" in program or "__assertfail" in program for program in programs]


def random_calls(layer: dict[str, Any], count: int) -> Iterator[PrefillCall | UpdateCall]:
    """Calls of other batches, lengths and drafts, with maps in one packed tensor as the engine has them."""
    rng = random.Random(0)
    packed = torch.zeros(4000, dtype=torch.int32)
    every: dict[str, Any] = {
        **{name: layer[name] for name in ("weight", "bias", "conv_states", "activation")},
        "pad_slot_id": -1,
        "query_starts": None,
    }

    def maps(size: int) -> torch.Tensor:
        return packed[rng.randrange(2000) :][:size]

    for number in range(count):
        num_sequences, length = rng.choice([1, 2, 16, 33, 300]), rng.choice([1, 2, 5, 7, 16, 40])
        shape = (num_sequences, length) if number % 4 == 2 else (num_sequences * (1 if number % 4 == 1 else length),)
        dim, x_columns = layer["weight"].shape[1], layer.get("x_columns")
        gate_in, gate_out, x = torch.zeros(*shape, 3 * dim, dtype=layer["x_dtype"]).chunk(3, -1)
        if not layer["gated"]:
            gate_in, gate_out, x = None, None, torch.zeros(*shape, x_columns or dim, dtype=x.dtype)[..., :dim]
        tokens = {"x": x, "gate_in": gate_in, "gate_out": gate_out, "out": torch.zeros(x.shape, dtype=x.dtype)}
        block_names = ["initial_state_idx", "block_idx_last_scheduled_token"]
        first_names = ["block_idx_first_scheduled_token", "num_computed_tokens"]
        if layer["paged"]:
            num_blocks = rng.choice([1, 3, 6])
            table = maps(num_sequences * num_blocks).view(num_sequences, num_blocks)
            lines = {"state_indices": table} | {name: maps(num_sequences) for name in block_names}
            firsts = {name: maps(num_sequences) for name in first_names}
        else:
            lines = {"state_indices": maps(num_sequences)} | dict.fromkeys(block_names)
            firsts = dict.fromkeys(first_names)
        if number % 4 == 0:
            yield PrefillCall(
                **every, **tokens, **lines, query_start_loc=maps(num_sequences + 1),
                has_initial_state=torch.zeros(num_sequences, dtype=torch.bool), **firsts,
                block_size_tokens=rng.choice([1, 16, 24]) if layer["paged"] else None,
            )  # fmt: skip
            continue
        is_draft = rng.random() < 0.5
        yield UpdateCall(
            **every, **tokens, **lines, query_start_loc=maps(num_sequences + 1) if number % 4 == 3 else None,
            max_query_len=length if number % 4 == 3 else None,
            num_accepted_tokens=maps(num_sequences) if is_draft else None,
        )  # fmt: skip


def variants(module: ModuleType, layer: dict[str, Any], num_calls: int) -> dict[str, Any]:
    with serving(module):
        calls = warm_up_calls(module.WARM_UP_TOKENS, **layer)
        warmed_up = {specialised(plan(module, call), 90)[3] for call in calls}
        needed = {specialised(plan(module, call), 90)[3] for call in random_calls(layer, num_calls)}
    return {"num_calls": num_calls, "num_variants": len(needed), "not_warmed_up": sorted(needed - warmed_up)}


def main() -> None:
    lfm2 = {**LFM2, "activation": None, "gated": True, "drafts": False, "paged": False, "x_dtype": BFLOAT16}
    wide = {**WIDE, "gated": False, "drafts": True, "paged": True, "x_dtype": torch.float32}
    # Queries, keys and values in front of other columns, whose number is no multiple of 16.
    columns = {**lfm2, "activation": "silu", "gated": False, "x_columns": 2 * LFM2["weight"].shape[1] + 10}
    layers = {
        "plain": {**lfm2, "drafts": True},
        "paged": {**lfm2, "drafts": True, "paged": True},
        "columns": {**columns, "drafts": True},
    }
    with serving(triton_cuda):
        overlaps = {
            90: overlaps_launches(90, [lfm2, wide]),
            80: overlaps_launches(80, [lfm2]),
            75: overlaps_launches(75, [lfm2]),
        }
        asserted = asserts(lfm2)
    counted = {
        source: {form: variants(module, layer, 48) for form, layer in layers.items()}
        for source, module in (("triton_cuda", triton_cuda), ("triton_ascend", triton_ascend))
    }
    print(json.dumps({"overlaps_launches": overlaps, "asserts": asserted, "variants": counted}))


if __name__ == "__main__":
    main()
