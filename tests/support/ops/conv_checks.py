"""What every implementation of the causal convolution must do, on random calls; `serving` picks the implementation.

The float64 truth is compared with the table's tolerances as they stand: a sum of at most nine terms, products of values
below about five, errs by less than 1e-5 in float32, and an output by half a unit of its dtype (bfloat16 0.4 %).
States are exact: what is kept is an input, rounded to the states' dtype. What must not depend on how a sequence is cut
or where it lies is compared bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from kernels.causal_conv1d import ops, reference
from tests.support.bits import same_bits
from tests.support.engine.serving import serving as serving_op
from tests.support.ops.conv_cases import Call, block_calls, float64_truth, prefill_call, randn, update_call
from tests.tolerances import OP

PREFILL, UPDATE = "causal_conv1d_prefill", "causal_conv1d_update"
CALLS = {PREFILL: prefill_call, UPDATE: update_call}
# Largest and smallest histories are far outside of float16's range.
SCALES = (2.0**100, 2.0**-66)


@contextmanager
def serving(module: ModuleType, device: str = "cpu", *, num_cores: int = 3) -> Iterator[None]:
    """Have this implementation serve the device; few cores, so that a program of a fixed grid has several items."""
    with serving_op("causal_conv1d", module, device, num_cores=num_cores):
        yield


def run(name: str, call: Call, *, in_place: bool = False, device: str = "cpu") -> tuple[torch.Tensor, Call]:
    """The result, on the host, and the call as it was made: on the device, with its own x, out and states."""
    call = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in call.items()}
    call |= {
        "x": call["x"].clone(),
        "conv_states": None if call["conv_states"] is None else call["conv_states"].clone(),
    }
    call["out"] = call["x"] if in_place else torch.full_like(call["x"], torch.nan)
    result = getattr(ops, name)(**call)
    assert result is call["out"]
    return result.cpu(), call


def check_float64(name: str, call: Call, *, in_place: bool, device: str = "cpu") -> None:
    expected, expected_states = float64_truth(getattr(reference, name), call, in_place=in_place)
    result, made = run(name, call, in_place=in_place, device=device)
    absolute, relative = OP[result.dtype]
    torch.testing.assert_close(result.double(), expected, atol=absolute, rtol=relative)
    if expected_states is not None:
        assert same_bits(made["conv_states"].cpu(), expected_states)


def check_blocks(device: str = "cpu", **sizes: int) -> None:
    """The states after block boundaries, wherever the old state lies."""
    for call in block_calls(**sizes):
        check_float64(PREFILL, call, in_place=False, device=device)


def check_range(name: str, seed: int, scale: float, *, device: str = "cpu") -> None:
    """A power of two scales inputs, histories, outputs and states exactly: bfloat16's range is kept."""
    call = CALLS[name](seed, dtypes=(torch.float32, torch.bfloat16)) | {"activation": None}
    scaled = {
        key: None if call[key] is None else call[key] * scale for key in ("x", "bias", "conv_states") if key in call
    }
    result, made = run(name, call, device=device)
    result_of_scaled, made_of_scaled = run(name, {**call, **scaled}, device=device)
    assert same_bits(result_of_scaled, result * scale)
    if call["conv_states"] is not None:
        assert same_bits(made_of_scaled["conv_states"], made["conv_states"] * scale)


def check_order(name: str, seed: int, *, device: str = "cpu") -> None:
    """Sequences in another order, with their tokens and maps, give the same bits."""
    call = CALLS[name](seed)
    rng, starts = random.Random(seed), call.get("query_start_loc")
    if (starts is None and call.get("state_indices") is None) or call["x"].shape[0] == 0:
        return
    lengths = [1] * call["x"].shape[0] if starts is None else starts.diff().tolist()
    order = rng.sample(range(len(lengths)), len(lengths))
    begins = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    tokens = [token for n in order for token in range(begins[n], begins[n + 1])]
    tokens += range(begins[-1], call["x"].shape[0])
    if call.get("state_indices") is None and call["conv_states"] is not None:
        call["state_indices"] = torch.arange(1, len(lengths) + 1, dtype=torch.int32) % call["conv_states"].shape[0]
    other = dict(call)
    for key in ("x", "gate_in", "gate_out"):
        if call.get(key) is not None:
            other[key] = call[key][tokens]
    for key in ("state_indices", "has_initial_state", "initial_state_idx", "block_idx_first_scheduled_token",
                "block_idx_last_scheduled_token", "num_computed_tokens", "num_accepted_tokens"):  # fmt: skip
        if call.get(key) is not None:
            other[key] = call[key][order]
    if starts is not None:
        other["query_start_loc"] = torch.tensor([0, *(lengths[n] for n in order)]).cumsum(0).int()
    result, made = run(name, call, device=device)
    result_of_other, made_of_other = run(name, other, device=device)
    assert same_bits(result_of_other, result[tokens])
    if call["conv_states"] is not None:
        assert same_bits(made_of_other["conv_states"], made["conv_states"])


def check_sources(name: str, seed: int, *, device: str = "cpu") -> None:
    """States read from other lines give the bits of a call whose lines hold copies of these; sources stay as they are,
    and a sequence without tokens copies nothing."""
    call, rng = CALLS[name](seed), random.Random(seed)
    lines, states = call.get("state_indices"), call["conv_states"]
    if lines is None or lines.dim() > 1 or not len(lines) or call["x"].shape[0] == 0:
        return
    # The last three lines are kept states, which several sequences may continue.
    states = torch.cat([states, randn(3, *states.shape[1:], generator=torch.Generator().manual_seed(seed)).to(states)])
    kept = range(len(states) - 3, len(states))
    starts, pad_slot_id = call.get("query_start_loc"), call.get("pad_slot_id", -1)
    each = 1 if call["x"].dim() == 2 else call["x"].shape[1]
    lengths = [each] * len(lines) if starts is None else starts.diff().tolist()
    is_padding = (lines <= 0) | (lines == pad_slot_id if pad_slot_id is not None else False)
    sources, copied = lines.clone(), states.clone()
    for n, line in enumerate(lines.tolist()):
        if not is_padding[n] and (n == 0 or rng.random() < 0.7):
            sources[n] = rng.choice(kept)
            if lengths[n]:
                copied[line] = states[sources[n]]
    expected, made = run(name, {**call, "conv_states": copied}, device=device)
    expected_states = made["conv_states"].cpu()
    num_rows = call["weight"].shape[0] - 1
    for n, line in enumerate(lines.tolist()):
        if not is_padding[n]:  # what is behind the rows of a state stays as it was
            num_drafts = 0 if call.get("num_accepted_tokens") is None or not lengths[n] else lengths[n] - 1
            expected_states[line, num_rows + num_drafts :] = states[line, num_rows + num_drafts :]
    call |= {"conv_states": states, "source_state_indices": sources}
    result, made = run(name, call, device=device)
    assert same_bits(result, expected)
    assert same_bits(made["conv_states"].cpu(), expected_states)


def one_sequence(seed: int, *, dim: int | None = None, num_tokens: int | None = None) -> tuple[random.Random, Call]:
    """A float32 sequence: its tokens (x and perhaps gates) under "tokens", and the fixed arguments of its calls."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    width, dim = rng.randint(2, 8), dim or rng.choice([1, 5, 16, 33])
    num_tokens = num_tokens or rng.randint(1, 24)
    tokens = {name: randn(num_tokens, dim, generator=generator) for name in ("x", "gate_in", "gate_out")}
    return rng, {
        "weight": torch.randn(width, dim, generator=generator),
        "bias": torch.randn(dim, generator=generator) if rng.random() < 0.5 else None,
        "activation": rng.choice([None, "silu"]),
        "tokens": tokens if rng.random() < 0.5 else {"x": tokens["x"]},
    }


def moved(call: Call, device: str) -> Call:
    """The arguments of `one_sequence` on a device."""
    return {
        key: moved(value, device) if isinstance(value, dict) else value.to(device) if torch.is_tensor(value) else value
        for key, value in call.items()
    }


def prefill_chunks(
    fixed: Call,
    states: torch.Tensor,
    *chunks: tuple[Call, int, int],
    lines: torch.Tensor | None = None,
    block_size: int | None = None,
    module: Any = ops,
) -> list[torch.Tensor]:
    """One call for tokens [start, end) of each sequence (tokens, start, end), whose states are in lines 1, 2, ... or in
    `lines`; with a block size, in those blocks of a prefix cache."""
    arguments = {name: value for name, value in fixed.items() if name != "tokens"}
    lengths = [end - start for _, start, end in chunks]
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=states.device)

    blocks: Call = {}
    if block_size is not None:
        blocks = {
            "initial_state_idx": ints([max(start - 1, 0) // block_size for _, start, _ in chunks]),
            "block_idx_first_scheduled_token": ints([start // block_size for _, start, _ in chunks]),
            "block_idx_last_scheduled_token": ints([max(end - 1, 0) // block_size for _, _, end in chunks]),
            "num_computed_tokens": ints([start for _, start, _ in chunks]),
            "block_size_tokens": block_size,
        }
    result = module.causal_conv1d_prefill(
        **{name: torch.cat([tokens[name][start:end] for tokens, start, end in chunks]) for name in chunks[0][0]},
        **arguments,
        conv_states=states,
        **blocks,
        query_start_loc=ints(starts),
        state_indices=ints(list(range(1, len(chunks) + 1))) if lines is None else lines,
        has_initial_state=torch.tensor([start > 0 for _, start, _ in chunks], device=states.device),
    )
    return list(result.split(lengths))


def check_chunkings(rng: random.Random, fixed: Call) -> None:
    """Two sequences side by side, in any chunks (some empty) and token by token, give the bits of each one whole.

    On the host the reference's bits too.
    """
    (num_tokens, dim), width = fixed["tokens"]["x"].shape, fixed["weight"].shape[0]
    device = fixed["weight"].device
    both = [fixed["tokens"], {name: value.flip(0) for name, value in fixed["tokens"].items()}]
    whole_states = torch.full((3, width - 1, dim), 7.0, device=device)
    token_states, whole = whole_states.clone(), []
    chunk_states = torch.full((6, width - 1, dim), 7.0, device=device)
    chunk_lines = torch.tensor(rng.sample(range(1, 6), 2), dtype=torch.int32, device=device)
    for sequence, tokens in enumerate(both):
        states = whole_states[[0, sequence + 1]]
        (alone,) = prefill_chunks(fixed, states, (tokens, 0, num_tokens))
        whole.append(alone)
        if device.type == "cpu" and fixed["activation"] is None:
            (truth,) = prefill_chunks(fixed, states.clone(), (tokens, 0, num_tokens), module=reference)
            assert same_bits(truth, alone)
        whole_states[sequence + 1] = states[1]

    num_cuts = rng.randint(1, 4)
    bounds = [[0, *sorted(rng.randint(0, num_tokens) for _ in range(num_cuts)), num_tokens] for _ in both]
    bounds[0][-2] = num_tokens  # the last chunk of one sequence is empty beside the other's
    steps = [
        prefill_chunks(
            fixed,
            chunk_states,
            *((tokens, at[n], at[n + 1]) for tokens, at in zip(both, bounds, strict=True)),
            lines=chunk_lines,
        )
        for n in range(num_cuts + 1)
    ]
    for n, alone in enumerate(whole):
        assert same_bits(torch.cat([step[n] for step in steps]), alone)
    expected_states = torch.full_like(chunk_states, 7.0)
    expected_states[chunk_lines.long()] = whole_states[1:]
    assert same_bits(chunk_states, expected_states)

    token_states[1:] = 0
    arguments = {name: value for name, value in fixed.items() if name != "tokens"}
    updates = [
        ops.causal_conv1d_update(
            **{name: torch.stack([tokens[name][token] for tokens in both]) for name in both[0]},
            **arguments,
            conv_states=token_states,
            state_indices=torch.tensor([1, 2], dtype=torch.int32, device=device),
        )
        for token in range(num_tokens)
    ]
    assert same_bits(torch.stack(updates, dim=1), torch.stack(whole))
    assert same_bits(token_states, whole_states)


def check_paged_chunkings(rng: random.Random, fixed: Call) -> None:
    """In a prefix cache, chunks and then single tokens give the bits of each sequence whole, in every block's line."""
    (num_tokens, dim), width = fixed["tokens"]["x"].shape, fixed["weight"].shape[0]
    device, block_size = fixed["weight"].device, rng.choice([1, 2, 3, 8])
    both = [fixed["tokens"], {name: value.flip(0) for name, value in fixed["tokens"].items()}]
    num_blocks = (num_tokens - 1) // block_size + 1
    order = rng.sample(range(1, 2 * num_blocks + 2), 2 * num_blocks)
    lines = torch.tensor(order, dtype=torch.int32, device=device).view(2, num_blocks)
    whole_states = torch.full((2 * num_blocks + 2, width - 1, dim), 7.0, device=device)
    states = whole_states.clone()
    every = [(tokens, 0, num_tokens) for tokens in both]
    whole = prefill_chunks(fixed, whole_states, *every, lines=lines, block_size=block_size)

    num_prefilled = rng.randint(1, num_tokens)
    cuts = [sorted(rng.randint(0, num_prefilled) for _ in range(rng.randint(1, 4))) for _ in both]
    num_cuts = max(len(at) for at in cuts)
    bounds = [[0, *at, *[num_prefilled] * (num_cuts + 1 - len(at))] for at in cuts]
    outputs: list[list[torch.Tensor]] = [[], []]
    for n in range(num_cuts + 1):
        chunks = [(tokens, at[n], at[n + 1]) for tokens, at in zip(both, bounds, strict=True)]
        results = prefill_chunks(fixed, states, *chunks, lines=lines, block_size=block_size)
        for result, output in zip(results, outputs, strict=True):
            output.append(result)
    arguments = {name: value for name, value in fixed.items() if name != "tokens"}
    for token in range(num_prefilled, num_tokens):
        result = ops.causal_conv1d_update(
            **{name: torch.stack([tokens[name][token] for tokens in both]) for name in both[0]},
            **arguments,
            conv_states=states,
            state_indices=lines,
            initial_state_idx=torch.full((2,), (token - 1) // block_size, dtype=torch.int32, device=device),
            block_idx_last_scheduled_token=torch.full((2,), token // block_size, dtype=torch.int32, device=device),
        )
        for row, output in zip(result, outputs, strict=True):
            output.append(row[None])
    assert same_bits(torch.cat([*outputs[0], *outputs[1]]), torch.cat(whole))
    assert same_bits(states, whole_states)


def check_drafts(rng: random.Random, fixed: Call) -> None:
    """Speculative steps with random acceptances, plain or varlen, give the bits of the accepted tokens alone."""
    (num_tokens, dim), width = fixed["tokens"]["x"].shape, fixed["weight"].shape[0]
    device = fixed["weight"].device
    draft = rng.randint(1, 6)
    whole_states = torch.zeros(2, width - 1, dim, device=device)
    (whole,) = prefill_chunks(fixed, whole_states, (fixed["tokens"], 0, num_tokens))
    states = torch.zeros(2, width - 1 + draft, dim, device=device)
    outputs, done, accepted = [], 0, 1

    def one(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32, device=device)

    while done < num_tokens:
        keep = min(rng.randint(1, draft + 1), num_tokens - done)
        num_new = rng.randint(keep, draft + 1)
        tokens = {
            name: torch.cat([value[done : done + keep], torch.randn(num_new - keep, dim, device=device)])
            for name, value in fixed["tokens"].items()
        }
        form: Call = {"query_start_loc": torch.cat([one(0), one(num_new)]), "max_query_len": draft + 1}
        if rng.random() < 0.5:
            tokens, form = {name: value[None] for name, value in tokens.items()}, {}
        result = ops.causal_conv1d_update(
            **tokens,
            **{name: value for name, value in fixed.items() if name != "tokens"},
            **form,
            conv_states=states,
            state_indices=one(1),
            num_accepted_tokens=one(accepted),
        )
        outputs.append(result.reshape(-1, dim)[:keep])
        done, accepted = done + keep, keep
    assert same_bits(torch.cat(outputs), whole)
    assert same_bits(states[1, accepted - 1 : accepted + width - 2], whole_states[1])


def check_empty(device: str = "cpu") -> None:
    """No sequences is no work: an empty index tensor does not mean that sequences own the lines of their numbers."""
    states = torch.ones(3, 2, 4, device=device)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    weight = torch.ones(3, 4, device=device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    tokens = torch.ones(5, 4, device=device)
    assert ops.causal_conv1d_update(tokens[:0], weight, None, states, nothing).shape == (0, 4)
    assert ops.causal_conv1d_update(tokens[:0, None], weight, None, states, nothing).shape == (0, 1, 4)
    behind = {"query_start_loc": starts, "max_query_len": 1}
    for result in (
        ops.causal_conv1d_update(tokens, weight, None, states, nothing, **behind),
        ops.causal_conv1d_prefill(tokens, weight, None, states, starts, nothing, nothing.bool()),
    ):
        assert torch.equal(result, torch.zeros_like(tokens))
    in_place = ops.causal_conv1d_prefill(tokens, weight, None, states, starts, nothing, nothing.bool(), out=tokens)
    assert torch.equal(in_place, torch.ones_like(tokens))
    assert torch.equal(states, torch.ones_like(states))


def check_garbage_in_padding(name: str, device: str = "cpu") -> None:
    """Rows of the null line and of no line may hold anything in a captured graph: their outputs are zero."""
    x, gate_in, gate_out = torch.randn(3, 4, 8).unbind(0)
    for tensor in (x, gate_in, gate_out):
        tensor[0], tensor[2] = torch.nan, torch.inf
    lines = torch.tensor([0, 2, -1, 3], dtype=torch.int32)
    call: Call = {"x": x, "weight": torch.randn(3, 8), "bias": None, "conv_states": torch.randn(4, 2, 8),
                  "gate_in": gate_in, "gate_out": gate_out, "state_indices": lines}  # fmt: skip
    if name == PREFILL:
        starts, initial = torch.arange(5, dtype=torch.int32), torch.ones(4, dtype=torch.bool)
        call |= {"query_start_loc": starts, "has_initial_state": initial}
    result, _ = run(name, call, device=device)
    assert torch.equal(result[[0, 2]], torch.zeros(2, 8))
    assert result.isfinite().all()
