"""The gated delta rule of Qwen3.5-9B (16 key heads, 32 value heads of 128 x 128, bfloat16): our kernels against states
that are gathered, advanced and scattered, and prompts in chunks against prompts token by token.

    python -m bench.kernels.delta [--json FILE]

The baseline of a decode step is what a layer does without a kernel of its own: our convolution, the states gathered by
line, the recurrence (fla-core's `fused_recurrent_gated_delta_rule` if it is installed, else our own kernel that walks
tokens), the states scattered, and the gated norm in torch. Before a row is timed, outputs and states of both are
compared with plain torch. Minimum: states read and written once, inputs and weights read once, outputs written once.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.kernels.timing import FLOOR_BYTES_PER_SECOND, num_sets, time_graph
from kernels.causal_conv1d.ops import causal_conv1d_update
from kernels.gated_delta import any_device, triton_cuda
from kernels.gated_delta.ops import gated_delta_decode, gated_norm, gates_of

KEY_HEADS, VALUE_HEADS, SIZE, WIDTH, EPS = 16, 32, 128, 4, 1e-6
CHANNELS, VALUE_SIZE = (2 * KEY_HEADS + VALUE_HEADS) * SIZE, VALUE_HEADS * SIZE
DECODE_ROWS = (1, 16, 64, 256)  # sequences
PREFILL_ROWS = ((512, 1), (2048, 1), (8192, 1), (8192, 8))  # tokens, sequences
BYTES_BAR, PARTS_BAR, BARRED_ROW = 1.15, 1.2, 64
# bfloat16 outputs of norm 1, and states whose numbers are summed in another order, or of TF32 factors.
OUT_TOLERANCE, STATE_TOLERANCE = 6e-2, 2e-2
Step = Callable[..., torch.Tensor]
Advance = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Result:
    """One measured row; other: the time of what it is compared with."""

    name: str
    microseconds: float
    other_microseconds: float
    bytes_moved: int

    @property
    def of_minimum(self) -> float:
        """The time as a multiple of what the bytes take."""
        return self.microseconds * 1e-6 * FLOOR_BYTES_PER_SECOND / self.bytes_moved


def decode_arguments(num_sequences: int) -> dict[str, Any]:
    """Inputs are columns of one product, as in a model."""
    generator = torch.Generator("cuda").manual_seed(num_sequences)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    product = values(num_sequences, CHANNELS + VALUE_SIZE + 2 * VALUE_HEADS).bfloat16()
    qkv, z, b, a = product.split((CHANNELS, VALUE_SIZE, VALUE_HEADS, VALUE_HEADS), dim=1)
    lines = torch.randperm(num_sequences, device="cuda", generator=generator).int() + 1
    return {
        "qkv": qkv,
        "z": z,
        "b": b,
        "a": a,
        "taps": values(WIDTH, CHANNELS).bfloat16() * 0.5,
        "conv_states": values(num_sequences + 1, WIDTH - 1, CHANNELS).bfloat16(),
        "a_log": values(VALUE_HEADS) * 0.5,
        "dt_bias": values(VALUE_HEADS),
        "norm_weight": values(SIZE),
        "states": values(num_sequences + 1, VALUE_HEADS, SIZE, SIZE) * 0.1,
        "state_indices": lines,
        "eps": EPS,
    }


def decode_bytes(arguments: dict[str, Any]) -> int:
    num_sequences = len(arguments["qkv"])
    state_bytes = 2 * num_sequences * (VALUE_SIZE * SIZE * 4 + (WIDTH - 1) * CHANNELS * 2)
    in_and_out_bytes = 2 * num_sequences * (CHANNELS + 2 * VALUE_SIZE + 2 * VALUE_HEADS)
    return state_bytes + in_and_out_bytes + arguments["taps"].nbytes


def recurrence() -> tuple[str, Advance]:
    """(its name, what advances gathered states, behind a null line, by a token)."""
    try:
        fused: Any = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    except ImportError:
        return "own", _walk
    return "fla", functools.partial(_by_fla, fused)


def _walk(qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
          states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Our kernel for short sequences, on the gathered states."""
    num = len(qkv)
    starts = torch.arange(num + 1, dtype=torch.int32, device="cuda")
    lines = torch.arange(1, num + 1, dtype=torch.int32, device="cuda")
    out = triton_cuda.prefill(qkv, b, a, a_log, dt_bias, states, starts, lines, lines > 0, None)
    return out, states[1:]


def _by_fla(fused: Any, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor,
            dt_bias: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    sizes = (KEY_HEADS * SIZE, KEY_HEADS * SIZE, VALUE_SIZE)
    q, k, v = (x.unflatten(1, (-1, SIZE)).unsqueeze(1) for x in qkv.split(sizes, dim=1))
    beta, decay_log = gates_of(b, a, a_log, dt_bias, torch.float32)
    out, new = fused(
        *(q, k, v), g=decay_log.unsqueeze(1), beta=beta.unsqueeze(1), initial_state=states[1:], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out.squeeze(1), new


def in_parts(advance: Advance, *, eps: float, **arguments: Any) -> torch.Tensor:
    """The same step without a kernel of its own."""
    (qkv, z, b, a, taps, conv_states, a_log, dt_bias, norm_weight, states, lines) = arguments.values()
    convolved = causal_conv1d_update(qkv, taps, None, conv_states, lines, activation="silu")
    gathered = states.index_select(0, torch.cat((torch.zeros_like(lines[:1]), lines)))  # behind a null line
    out, new = advance(convolved, b, a, a_log, dt_bias, gathered)
    states.index_copy_(0, lines.long(), new)
    return gated_norm(out, z, norm_weight, eps)


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {name: arguments[name].clone() for name in ("conv_states", "states")}


def check(step: Step, arguments: dict[str, Any]) -> None:
    """Against plain torch; changes nothing."""
    ours, theirs = copied(arguments), copied(arguments)
    expected = any_device.decode(**theirs)
    torch.testing.assert_close(step(**ours).float(), expected.float(), atol=OUT_TOLERANCE, rtol=OUT_TOLERANCE)
    for name in ("conv_states", "states"):
        torch.testing.assert_close(ours[name], theirs[name], atol=STATE_TOLERANCE, rtol=STATE_TOLERANCE)


def measure_decode(num_sequences: int, advance: Advance) -> Result:
    first = decode_arguments(num_sequences)
    sets = [first, *(decode_arguments(num_sequences) for _ in range(max(2, num_sets(decode_bytes(first))) - 1))]
    steps = (gated_delta_decode, functools.partial(in_parts, advance))
    for step in steps:
        check(step, first)
    own, other = (time_graph([functools.partial(step, **arguments) for arguments in sets]) for step in steps)
    return Result(f"delta.decode.b{num_sequences}", own, other, decode_bytes(first))


def measure_prefill(num_tokens: int, num_sequences: int) -> Result:
    """In chunks, against all tokens of a sequence one after the other."""
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    qkv = torch.randn(num_tokens, CHANNELS, device="cuda", generator=generator).bfloat16()
    gates = torch.randn(num_tokens, 2 * VALUE_HEADS, device="cuda", generator=generator).bfloat16()
    b, a = gates.chunk(2, dim=1)
    a_log, dt_bias = (torch.randn(VALUE_HEADS, device="cuda", generator=generator) * 0.5 for _ in range(2))
    states = torch.zeros(num_sequences + 1, VALUE_HEADS, SIZE, SIZE, device="cuda")
    length = num_tokens // num_sequences
    starts = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device="cuda")
    lines = torch.arange(1, num_sequences + 1, dtype=torch.int32, device="cuda")
    args = (qkv, b, a, a_log, dt_bias)

    def run(of: torch.Tensor, max_short_tokens: int) -> torch.Tensor:
        return triton_cuda.prefill(
            *args, of, starts, lines, lines < 0, None, max_short_tokens=max_short_tokens
        )  # fmt: skip

    ways = (triton_cuda.MAX_SHORT_TOKENS, num_tokens)
    expected_states = states.clone()
    expected = any_device.prefill(*args, expected_states, starts, lines, lines < 0, None)
    for way in ways:
        found_states = states.clone()
        found = run(found_states, way)
        torch.testing.assert_close(found.float(), expected.float(), atol=OUT_TOLERANCE, rtol=OUT_TOLERANCE)
        torch.testing.assert_close(found_states, expected_states, atol=STATE_TOLERANCE, rtol=STATE_TOLERANCE)
    own, other = (time_graph([functools.partial(run, states, way)]) for way in ways)
    num_bytes = qkv.nbytes + gates.nbytes + 2 * num_tokens * VALUE_SIZE + 2 * states[1:].nbytes
    return Result(f"delta.prefill.t{num_tokens}.s{num_sequences}", own, other, num_bytes)


def report(title: str, results: list[Result]) -> None:
    print(f"| {title} | us | other us | other / ours | MB | of the bytes' time |\n|---|---|---|---|---|---|")
    for result in results:
        ratio = result.other_microseconds / result.microseconds
        numbers = f"{result.microseconds:.1f} | {result.other_microseconds:.1f} | {ratio:.2f}"
        print(f"| {result.name} | {numbers} | {result.bytes_moved / 1e6:.0f} | {result.of_minimum:.2f} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    name, advance = recurrence()
    print(f"recurrence of the baseline: {name}\n")
    decodes = [measure_decode(num_sequences, advance) for num_sequences in DECODE_ROWS]
    report("decode, against its parts", decodes)
    row = decodes[DECODE_ROWS.index(BARRED_ROW)]
    rate, ratio = FLOOR_BYTES_PER_SECOND / 1e12, row.other_microseconds / row.microseconds
    print(f"{row.name}: {row.of_minimum:.2f} of the bytes' time at {rate} TB/s (bar {BYTES_BAR})")
    print(f"{row.name}: {ratio:.2f} times as fast as its parts (bar {PARTS_BAR})\n")
    prefills = [measure_prefill(*row) for row in PREFILL_ROWS]
    report("prefill, against a walk", prefills)
    if options.json:
        rows = [asdict(result) for result in decodes + prefills]
        options.json.write_text(json.dumps({"rows": rows, "baseline": name}, indent=1))


if __name__ == "__main__":
    main()
