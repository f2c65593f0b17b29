"""Random calls of the causal convolution ops, one for every seed, and what float64 says they should do.

Neighbouring seeds take the forms of a call in turn: 8 cover those of a prefill (`prefill_call`), 12 those of an update.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Call = dict[str, Any]


def prefill_call(
    seed: int, *, dim: int | None = None, num_sequences: int | None = None, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> Call:
    """Keyword arguments of one `causal_conv1d_prefill` call: any form, lengths around the width."""
    rng = random.Random(seed)
    width, dim = rng.randint(2, 8), dim or rng.choice([1, 2, 3, 17, 32, rng.randint(1, 40)])
    lengths = [
        rng.choice([0, 1, width - 2, width - 1, width, rng.randint(0, 40 if num_sequences is None else 3)])
        for _ in range(rng.randint(0, 5) if num_sequences is None else num_sequences)
    ]
    call = _common_arguments(rng, width, dim, sum(lengths) + rng.choice([0, 0, 3]), dtypes)
    call |= {"query_start_loc": _starts(lengths)}
    if rng.random() < 0.8:
        call["has_initial_state"] = torch.tensor([rng.random() < 0.6 for _ in lengths], dtype=torch.bool)
    form = ("lines", "blocks", "lines", "batch", "lines", "blocks", "lines", "none")[seed % 8]
    if form == "none":
        return call | {"conv_states": None, "has_initial_state": None}
    state_len = width - 1 + rng.choice([0, 0, 2])
    if form == "blocks":
        call |= _paged_lines(rng, lengths, state_len, dim, dtypes)
        return call | _pad_slot(rng, call)
    num_lines = len(lengths) + rng.randint(1, 4)
    call["conv_states"] = _states(rng, num_lines, state_len, dim, dtypes)
    if form == "lines":
        call["state_indices"] = _lines(rng, len(lengths), num_lines)
    return call | _pad_slot(rng, call)


def update_call(
    seed: int, *, dim: int | None = None, num_sequences: int | None = None, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> Call:
    """Keyword arguments of one `causal_conv1d_update` call.

    One token a sequence, several or varlen (one sequence then is live and empty), speculative or not, paged or not:
    12 successive seeds have each combination once.
    """
    rng = random.Random(seed)
    width, dim = rng.randint(2, 8), dim or rng.choice([1, 2, 3, 17, 32, rng.randint(1, 40)])
    form, is_paged = ("one", "several", "varlen")[seed % 3], seed // 6 % 2 == 0
    num_sequences, tokens_each = num_sequences or rng.randint(2, 6), rng.randint(1, 9)
    if form == "one":
        tokens_each = 1
    lengths = [tokens_each] * num_sequences
    if form == "varlen":
        lengths = [rng.randint(0, tokens_each) for _ in lengths]
        lengths[:2] = rng.sample([0, tokens_each], 2)
    live = lengths.index(0) if form == "varlen" else None
    padding = rng.choice([0, 2]) if form == "varlen" else 0
    call = _common_arguments(rng, width, dim, sum(lengths) + padding, dtypes)
    if form == "several":
        for name in ("x", "gate_in", "gate_out"):
            if call.get(name) is not None:
                call[name] = call[name].unflatten(0, (num_sequences, tokens_each))
    if form == "varlen":
        call |= {"query_start_loc": _starts(lengths), "max_query_len": tokens_each}
    max_accepted = 1
    state_len = width - 1 + rng.choice([0, 2])
    if seed // 3 % 2:
        draft = rng.randint(tokens_each - 1, tokens_each + 2)
        state_len, max_accepted = width - 1 + draft, draft + 1
        call["num_accepted_tokens"] = _int32([rng.randint(1, max_accepted) for _ in lengths])
    if is_paged:
        num_blocks = 3
        num_lines = num_sequences * num_blocks + 3
        source, target = ([rng.randrange(num_blocks) for _ in lengths] for _ in range(2))
        if live is not None:
            target[live] = (source[live] + 1) % num_blocks
        kept = [] if live is None else [live * num_blocks + block for block in range(num_blocks)]
        lines = _lines(rng, num_sequences * num_blocks, num_lines, kept).view(num_sequences, num_blocks)
        _share(rng, lines, source, [n for n in range(num_sequences) if source[n] != target[n] and n != live])
        call |= {
            "conv_states": _states(rng, num_lines, state_len, dim, dtypes),
            "state_indices": lines,
            "initial_state_idx": _int32(source),
            "block_idx_last_scheduled_token": _int32(target),
        }
        return call | _pad_slot(rng, call, live)
    num_lines = num_sequences + rng.randint(1, 4)
    call["conv_states"] = _states(rng, num_lines, state_len, dim, dtypes)
    if rng.random() < 0.8:
        call["state_indices"] = _lines(rng, num_sequences, num_lines, [] if live is None else [live])
    return call | _pad_slot(rng, call, live)


def block_calls(*, dim: int = 3, length: int = 14, block_size: int = 2) -> Iterator[Call]:
    """Prefills with a prefix cache, in float32: old states in early, late and last blocks, and one behind them.

    Of each sequence 3 tokens lie before the chunk, whose boundaries are all asked for, or only the later ones.
    """
    width, computed = 6, 3
    last = (computed + length - 1) // block_size
    sources = [1, 2, 4, 6, last, last + 1]
    num_sequences, num_blocks = len(sources), last + 2
    call = _common_arguments(random.Random(0), width, dim, num_sequences * length, (torch.float32,))
    num_lines = num_sequences * num_blocks + 1
    for first in (computed // block_size, computed // block_size + 3):
        yield call | {
            "conv_states": _states(random.Random(first), num_lines, width - 1, dim, (torch.float32,)),
            "query_start_loc": _starts([length] * num_sequences),
            "has_initial_state": torch.ones(num_sequences, dtype=torch.bool),
            "state_indices": torch.arange(1, num_lines, dtype=torch.int32).view(num_sequences, num_blocks),
            "initial_state_idx": _int32(sources),
            "block_idx_first_scheduled_token": _int32([first] * num_sequences),
            "block_idx_last_scheduled_token": _int32([last] * num_sequences),
            "num_computed_tokens": _int32([computed] * num_sequences),
            "block_size_tokens": block_size,
        }


def float64_truth(reference: Any, call: Call, *, in_place: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs in float64 and the states afterwards; the gated input is rounded to x's dtype first, as the op states."""
    x, gate_in, gate_out = call["x"], call.get("gate_in"), call.get("gate_out")
    inputs = x if gate_in is None else x * gate_in
    states = None if call["conv_states"] is None else call["conv_states"].clone()
    wide = {
        "x": inputs.double(),
        "gate_in": None,
        "gate_out": None if gate_out is None else gate_out.double(),
        "conv_states": states,
    }
    # Weights of zero, a bias of one, in place over zeros: ones are the tokens that the op must compute.
    marks = torch.zeros_like(wide["x"])
    weight = call["weight"]
    probe = {"x": marks, "out": marks, "weight": torch.zeros_like(weight), "bias": torch.ones_like(weight[0])}
    probe |= {"activation": None, "gate_out": None, "conv_states": None if states is None else states.clone()}
    is_output = reference(**{**call, **wide, **probe}) != 0
    truth = reference(**{**call, **wide})
    return torch.where(is_output, truth, x.double() if in_place else 0.0), states


def randn(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Normal values, and among them a few zeros, half of them negative."""
    values = torch.randn(*shape, generator=generator)
    return torch.where(values.abs() < 0.1, torch.zeros_like(values).copysign(values), values)


def _common_arguments(
    rng: random.Random, width: int, dim: int, num_tokens: int, dtypes: tuple[torch.dtype, ...]
) -> Call:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    dtype, weight_dtype = rng.choice(dtypes), rng.choice(dtypes)
    # Slices of one wider tensor, as a packed projection gives them.
    packed = randn(num_tokens, 3 * dim, generator=generator).to(dtype)
    gate_in, x, gate_out = packed.split(dim, dim=1)
    return {
        "x": x if rng.random() < 0.5 else x.contiguous(),
        "weight": torch.randn(width, dim, generator=generator).to(weight_dtype),
        "bias": torch.randn(dim, generator=generator).to(weight_dtype) if rng.random() < 0.6 else None,
        "activation": rng.choice([None, "silu"]),
        "gate_in": gate_in if rng.random() < 0.4 else None,
        "gate_out": gate_out if rng.random() < 0.4 else None,
    }


def _states(
    rng: random.Random, num_lines: int, state_len: int, dim: int, dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return randn(num_lines, state_len, dim, generator=generator).to(rng.choice(dtypes))


def _lines(rng: random.Random, count: int, num_lines: int, kept: Sequence[int] = ()) -> torch.Tensor:
    """Distinct lines in random order; some of them, not those at the places `kept`, become the null line or -1."""
    lines = rng.sample(range(1, num_lines), count)
    return _int32(
        [rng.choice([0, -1]) if place not in kept and rng.random() < 0.2 else line for place, line in enumerate(lines)]
    )


def _pad_slot(rng: random.Random, call: Call, live: int | None = None) -> Call:
    """Often -1; sometimes no further index means padding, sometimes that of an ordinary line not of sequence `live`."""
    lines = call.get("state_indices")
    if lines is None or lines.numel() == 0 or rng.random() < 0.6:
        return {}
    others = [line for n, row in enumerate(lines.view(len(lines), -1).tolist()) if n != live for line in row]
    return {"pad_slot_id": rng.choice([None, -2, rng.choice(others)])}


def _share(rng: random.Random, lines: torch.Tensor, source: list[int], readers: list[int]) -> None:
    """Let some of the sequences that only read their source line read another one's, as a shared prefix has it."""
    for reader in readers:
        if rng.random() < 0.5:
            owner = rng.choice(readers)
            lines[reader, source[reader]] = lines[owner, source[owner]]


def _paged_lines(
    rng: random.Random, lengths: list[int], state_len: int, dim: int, dtypes: tuple[torch.dtype, ...]
) -> Call:
    block_size = rng.choice([1, 1, 2, 3, 8, 16])
    computed = [rng.randint(0, 3 * block_size) for _ in lengths]
    last = [max(before + length - 1, 0) // block_size for before, length in zip(computed, lengths, strict=True)]
    # Some ask for blocks whose boundaries do not lie in this chunk, or only for the later ones that do: the others must
    # not be written. The old state may lie in any block, written before or after all others.
    first = [max(before // block_size + rng.choice([-1, 0, 0, 1, 3]), 0) for before in computed]
    last = [block + rng.choice([0, 0, 1]) for block in last]
    num_blocks = max(last, default=0) + 2 + max(computed, default=0) // block_size
    num_lines = len(lengths) * num_blocks + 2
    lines = _lines(rng, len(lengths) * num_blocks, num_lines).view(len(lengths), num_blocks)
    source = [
        rng.choice([max(before - 1, 0) // block_size, rng.randint(min(start, end), end), rng.randrange(num_blocks)])
        for before, start, end in zip(computed, first, last, strict=True)
    ]
    _share(rng, lines, source, [n for n, block in enumerate(source) if block != last[n] and block < first[n]])
    return {
        "conv_states": _states(rng, num_lines, state_len, dim, dtypes),
        "state_indices": lines,
        "initial_state_idx": _int32(source),
        "block_idx_first_scheduled_token": _int32(first),
        "block_idx_last_scheduled_token": _int32(last),
        "num_computed_tokens": _int32(computed),
        "block_size_tokens": block_size,
    }


def _starts(lengths: list[int]) -> torch.Tensor:
    return _int32([sum(lengths[:end]) for end in range(len(lengths) + 1)])


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
