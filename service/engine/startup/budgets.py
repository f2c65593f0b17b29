"""Sizes of an engine that are not set, from the device's memory beside the weights. Pure functions, but for
`measure_graphs`.

A GPU or an NPU is the engine's: what steps do not need becomes adapter rows and KV blocks, as long as they can be of
use. A CPU's memory is everybody's, and is taken when it is first used: there a quarter of what is free is the KV
cache's, or what one request of the model's whole context takes if that is more, and half of it bounds everything.

What captured steps will take is measured on a few of them before the KV cache is sized. A trial runner has the model,
its rows and tables as wide as they will be, but a KV cache of a few blocks: what a graph takes depends on a step's
sizes alone. Its steps are captured and then let go, since graphs hold the addresses of the caches. Graphs share one
pool of memory, and those that are captured first are the largest: of each kind of step the first may make the pool
grow, and every graph takes something for its own nodes. Not verified on an NPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from adapters.row_plan import non_lora_bytes_for
from service.engine.ipc.config import EngineConfig, EngineOptions, default_block_size_tokens, has_prefix_cache
from service.engine.loras.interfaces import Rows
from service.engine.model.padding import StepSizes
from service.engine.model.runner import ModelRunner
from service.engine.scheduling.kv_blocks import BlockPool
from service.engine.step.launcher import StepLauncher
from service.models.layers.caches import COPIED_BLOCKS
from service.models.spec.config_json import ModelError

MIB, GIB = 2**20, 2**30
TOKEN_BUDGETS: Mapping[str, int] = MappingProxyType({"cuda": 8192, "npu": 2048, "cpu": 256})
MAX_SEQUENCES: Mapping[str, int] = MappingProxyType({"cuda": 256, "npu": 256, "cpu": 64})
# The KV cache's part of a CPU's free memory, if one context takes no more; the most rows: those of 64 adapters of rank
# 16, or this many bytes.
CPU_KV_SHARE = 0.25
CPU_ROWS, CPU_ROW_BYTES = 1024, 256 * MIB
# The part of free memory that an engine may use: on a CPU half; on a device all but what allocators lose.
CPU_SHARE, DEVICE_SHARE = 0.5, 0.96
# Rows' part of what is left beside steps; and the most that are of use: 1,024 adapters of rank 16.
ROWS_SHARE = 0.25
MAX_ROWS = 16_384
# Non-LoRA parameters of adapters: their part of the memory left, the lines and tables where these fit into it, and the
# most on a CPU.
SIDE_SHARE, SIDE_LINES, SIDE_TABLES, CPU_SIDE_BYTES = 1 / 16, 16, 2, 64 * MIB
# Part of the KV cache's bytes that kept states have where nothing is said.
STATE_CACHE_SHARE = 1 / 6
# Fewer than these, one adapter of rank 16, are no budget.
MIN_ROWS = 16
# Activations and logits may need this part of the free memory before a token budget that nobody has set is halved, and
# states this part, on a CPU half of it, before the number of sequences is.
STEPS_SHARE, STATES_SHARE = 0.25, 0.5
MIN_TOKEN_BUDGET, MIN_SEQUENCES = 512, 4
# Logits in float32 of a row, their sorted copy with int64 indices, probabilities and masks.
LOGITS_COPIES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Bytes that a model takes beside its weights.

    kv_bytes_per_token    in all attention layers
    state_bytes_per_line  of convolution, in all layers
    row_bytes             one LoRA row in all layers and projections
    bytes_per_step_token  most that a step holds for a token at the same time, beside logits
    non_lora_line_bytes       magnitudes, biases and norms of one adapter, in all projections
    non_lora_table_bytes      an embedding and a head of one adapter
    logits_bytes          of one row, float32
    context_tokens        of the longest request
    max_kv_tokens         most tokens of a KV cache that the device's attention takes; None: any number
    """

    kv_bytes_per_token: int
    state_bytes_per_line: int
    row_bytes: int
    bytes_per_step_token: int
    logits_bytes: int
    context_tokens: int
    non_lora_line_bytes: int = 0
    non_lora_table_bytes: int = 0
    max_kv_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Sizes that an engine is built with; see `EngineOptions`. step_bytes: left free for steps and graphs."""

    token_budget: int
    max_sequences: int
    block_size_tokens: int
    kv_bytes: int
    state_cache_bytes: int
    row_bytes: int
    side_bytes: int
    step_bytes: int


def decide_budgets(
    options: EngineOptions, sizes: ModelSizes, device_type: str, free_bytes: int, *, graph_bytes: int = 0
) -> Budgets:
    """The sizes of the options, and for those that are None the ones that suit the device.

    free_bytes   memory of the device (a CPU: of the machine), with the weights loaded
    graph_bytes  that captured steps will take, beside the inputs and outputs of the largest one

    Raises ModelError, one sentence, if memory is short.
    """
    is_cpu = device_type == "cpu"
    token_budget, max_sequences = _steps(options, sizes, device_type, free_bytes)
    block_size = options.block_size_tokens or default_block_size_tokens(device_type)
    step_bytes = graph_bytes + _step_bytes(options, sizes, device_type, token_budget, max_sequences)
    if not is_cpu:
        step_bytes += _penalty_bytes(sizes, max_sequences)
    state_cache_bytes = options.state_cache_bytes
    if not sizes.state_bytes_per_line or not has_prefix_cache(options, device_type):
        state_cache_bytes = 0
    elif state_cache_bytes is None and device_type == "npu":
        state_cache_bytes = 0  # no run on an NPU has shown that kept states are found and right there
    elif state_cache_bytes is None and options.kv_bytes is not None:
        state_cache_bytes = int(options.kv_bytes * STATE_CACHE_SHARE)
    given_bytes = (options.row_bytes or 0) + (options.kv_bytes or 0) + (options.side_bytes or 0)
    given_bytes += (state_cache_bytes or 0) + (options.prefix_host_bytes if is_cpu else 0)
    left = int((free_bytes - given_bytes) * (CPU_SHARE if is_cpu else DEVICE_SHARE)) - step_bytes
    row_bytes, kv_bytes, side_bytes = options.row_bytes, options.kv_bytes, options.side_bytes
    if row_bytes == 0:
        side_bytes = 0
    elif side_bytes is None:
        side_bytes = _side_bytes(sizes, device_type, max(int(left * SIDE_SHARE), 0))
        left -= side_bytes
    if row_bytes is None:
        most = max(CPU_ROWS * sizes.row_bytes, CPU_ROW_BYTES) if is_cpu else left
        row_bytes = min(int(left * ROWS_SHARE), most, MAX_ROWS * sizes.row_bytes)
        left -= row_bytes
    if kv_bytes is None:
        block_bytes = block_size * sizes.kv_bytes_per_token
        context_bytes = -(-sizes.context_tokens // block_size) * block_bytes
        most = max(int(free_bytes * CPU_KV_SHARE), context_bytes) if is_cpu else left
        # No more than all sequences can fill.
        kv_bytes = min(left, most, max_sequences * context_bytes)
        if sizes.max_kv_tokens is not None:  # among them those of the null block, which no request has
            kv_bytes = min(kv_bytes, (sizes.max_kv_tokens // block_size - 1) * block_bytes)
        if state_cache_bytes is None:
            state_cache_bytes = int(max(kv_bytes, 0) * STATE_CACHE_SHARE)
            kv_bytes = min(kv_bytes, left - state_cache_bytes)
        kv_bytes -= kv_bytes % block_bytes
    if (options.row_bytes is None and row_bytes < MIN_ROWS * sizes.row_bytes) or kv_bytes <= 0:
        raise ModelError(
            f"{shown(free_bytes)} of memory are free beside the weights, caches that were given take "
            f"{shown(given_bytes)}, and steps of {token_budget} tokens {shown(step_bytes)}, which leaves too little "
            "for the other caches: lower --token-budget or --max-sequences, set --kv-bytes and --adapter-row-bytes, "
            "take a smaller model, or end what else uses the device"
        )
    return Budgets(
        token_budget=token_budget,
        max_sequences=max_sequences,
        block_size_tokens=block_size,
        kv_bytes=kv_bytes,
        state_cache_bytes=state_cache_bytes or 0,
        row_bytes=row_bytes,
        side_bytes=side_bytes,
        step_bytes=step_bytes,
    )


def budgets_behind_graphs(
    options: EngineOptions,
    decided: EngineConfig,
    sizes: ModelSizes,
    device_type: str,
    free_bytes: int,
    graph_bytes: int,
) -> Budgets:
    """The budgets with a KV cache of all memory that is left. Raises ModelError if that is too little.

    free_bytes   memory of the device, with the weights loaded and without rows
    graph_bytes  that captured steps will take, as measured
    """
    settled = msgspec.structs.replace(
        options,
        token_budget=decided.token_budget,
        max_sequences=decided.max_sequences,
        row_bytes=decided.row_bytes,
        side_bytes=decided.side_bytes,
    )
    return decide_budgets(settled, sizes, device_type, free_bytes, graph_bytes=graph_bytes)


def _side_bytes(sizes: ModelSizes, device_type: str, most_bytes: int) -> int:
    """Bytes for non-LoRA parameters where none are set: a CPU's memory is allocated when it is used, a device's at the
    start. There tables, each as large as the base's, are allocated only where they are a small part of what is left."""
    line_bytes, table_bytes = sizes.non_lora_line_bytes, sizes.non_lora_table_bytes
    if device_type == "cpu":
        return min(most_bytes, CPU_SIDE_BYTES, 1000 * line_bytes)
    for num_tables in range(SIDE_TABLES, 0, -1):
        wanted = non_lora_bytes_for(line_bytes, table_bytes, num_lines=SIDE_LINES, num_tables=num_tables)
        if wanted <= most_bytes:
            return wanted
    return min(most_bytes, (1 + SIDE_LINES) * line_bytes)


def _steps(options: EngineOptions, sizes: ModelSizes, device_type: str, free_bytes: int) -> tuple[int, int]:
    """token_budget and max_sequences: the device's usual ones, made to fit what is given and the memory."""
    token_budget = options.token_budget or max(TOKEN_BUDGETS[device_type], options.max_sequences or 0)
    max_sequences = options.max_sequences or min(MAX_SEQUENCES[device_type], token_budget)
    states_bytes = free_bytes * STATES_SHARE * (CPU_SHARE if device_type == "cpu" else 1)
    while (
        options.max_sequences is None
        and max_sequences // 2 >= MIN_SEQUENCES
        and options.state_bytes is None
        and max_sequences * sizes.state_bytes_per_line > states_bytes
    ):
        max_sequences //= 2
    while (
        options.token_budget is None
        and token_budget // 2 >= max(MIN_TOKEN_BUDGET, max_sequences)
        and _pass_bytes(options, sizes, token_budget, max_sequences) > free_bytes * STEPS_SHARE
    ):
        token_budget //= 2
    return token_budget, max_sequences


def _step_bytes(
    options: EngineOptions, sizes: ModelSizes, device_type: str, token_budget: int, max_sequences: int
) -> int:
    """Activations, logits, state lines, and what is on its way to host memory."""
    num_bytes = _pass_bytes(options, sizes, token_budget, max_sequences) + _state_bytes(options, sizes, max_sequences)
    if options.prefix_host_bytes:  # through buffers, of a whole step's copies
        block_size = options.block_size_tokens or default_block_size_tokens(device_type)
        num_bytes += COPIED_BLOCKS * block_size * sizes.kv_bytes_per_token + sizes.state_bytes_per_line
    return num_bytes


def _pass_bytes(options: EngineOptions, sizes: ModelSizes, token_budget: int, max_sequences: int) -> int:
    """Activations and logits."""
    num_logits = min(max_sequences + options.max_prompt_logits, token_budget)
    return token_budget * sizes.bytes_per_step_token + LOGITS_COPIES * num_logits * sizes.logits_bytes


def _state_bytes(options: EngineOptions, sizes: ModelSizes, max_sequences: int) -> int:
    return max_sequences * sizes.state_bytes_per_line if options.state_bytes is None else options.state_bytes


def _penalty_bytes(sizes: ModelSizes, max_sequences: int) -> int:
    """Bytes of the token counts of all slots on a device, each as long as a row of logits, which the first request with
    a penalty allocates (`kernels.sampling.penalty_state.DenseState`)."""
    return (1 + max_sequences) * sizes.logits_bytes


def sentences(options: EngineOptions, budgets: Budgets, sizes: ModelSizes, device: str, free_bytes: int) -> list[str]:
    """The lines that the start prints: the memory found, its division, and the options that would change it."""
    num_rows = budgets.row_bytes // sizes.row_bytes
    num_tokens = budgets.kv_bytes // sizes.kv_bytes_per_token
    is_short = num_tokens < sizes.context_tokens
    values = {
        "--token-budget": (options.token_budget, f"{budgets.token_budget}"),
        "--max-sequences": (options.max_sequences, f"{budgets.max_sequences}"),
        "--block-size-tokens": (options.block_size_tokens, f"{budgets.block_size_tokens}"),
        "--kv-bytes": (
            options.kv_bytes,
            f"{shown(budgets.kv_bytes)} ({num_tokens:,} tokens"
            f"{f' of the {sizes.context_tokens:,} that one request could have' if is_short else ''})",
        ),
        "--adapter-row-bytes": (
            options.row_bytes,
            f"{shown(budgets.row_bytes)} ({num_rows:,} rows: {num_rows // 16:,} adapters of rank 16 everywhere)",
        ),
    }
    if budgets.side_bytes:
        values["--adapter-side-bytes"] = (options.side_bytes, shown(budgets.side_bytes))
    if budgets.state_cache_bytes:
        num_states = budgets.state_cache_bytes // sizes.state_bytes_per_line
        text = f"{shown(budgets.state_cache_bytes)} ({num_states:,} states)"
        values["--state-cache-bytes"] = (options.state_cache_bytes, text)
    facts = [
        f"{shown(free_bytes)} free on {device} beside the weights, of which steps need {shown(budgets.step_bytes)}"
    ]
    for word, is_given in (("given", True), ("decided from the machine", False)):
        named = [f"{flag} {text}" for flag, (value, text) in values.items() if (value is not None) is is_given]
        if named:
            facts.append(f"{word}: {', '.join(named)}")
    if len(facts) > 1 and not facts[-1].startswith("given"):
        facts[-1] += "; name any of them to change it, and the others follow"
    return facts


def shown(num_bytes: int) -> str:
    """For people: "3.2 GiB", "190 MiB"."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes // MIB} MiB"


# Blocks of a trial's caches: the null block, and one.
TRIAL_BLOCKS = 2


def measure_graphs(trial: ModelRunner, rows: Rows | None, config: EngineConfig, free_bytes: Callable[[], int]) -> int:
    """Bytes that the graphs of all sizes will take together. The trial's kernels are compiled; its graphs are its own.
    Where a capture fails, that of the engine will, and nothing is captured from then on.

    free_bytes  of the device, now
    """
    launcher = StepLauncher(trial, rows, BlockPool(trial.capacity.num_blocks), config, keeps_tokens=False)
    first, later = trial.sizes_to_capture()
    launcher.run_eagerly(first[0])  # what ops make at their first call is no graph's
    return estimate_bytes([*first, *later], trial.captured.max_graphs, launcher.capture, free_bytes)


def estimate_bytes(
    sizes: Sequence[StepSizes], num_graphs: int, capture: Callable[[StepSizes], None], free_bytes: Callable[[], int]
) -> int:
    """Bytes of num_graphs graphs, from two of each kind of step: the largest, which bring the pool, and the next.

    sizes    of all that are to be captured, the largest of each kind first
    capture  captures steps of one size
    """
    kinds: dict[tuple[bool, bool, bool], list[StepSizes]] = {}
    for one in sizes:
        kinds.setdefault((one.all_decode, one.has_lora, one.window_rows > 0), []).append(one)
    before = free_bytes()
    for kind in kinds.values():
        capture(kind[0])
    with_pool = free_bytes()
    pairs = [kind[1] for kind in kinds.values() if len(kind) > 1]
    for one in pairs:
        capture(one)
    # Without pairs each kind has one size, and the largest stand for all.
    each = (with_pool - free_bytes()) / len(pairs) if pairs else (before - with_pool) / len(kinds)
    return max(0, round(before - with_pool + max(0, num_graphs - len(kinds)) * max(each, 0)))
