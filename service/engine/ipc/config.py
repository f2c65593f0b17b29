"""Options of the engine process. Imports no torch: the API process builds them from its settings."""

from __future__ import annotations

from typing import Literal

import msgspec

MIB = 2**20


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and paths; checked once, when built. Values for None are chosen at the engine's start: sizes by
    `service.engine.startup.budgets`, unless said otherwise below.

    model_dir                   Hugging Face directory of the base model
    store_root                  root of the adapter store
    dtype                       "auto": the checkpoint's (float16 on a CPU: float32)
    weights                     of layers: "auto": as the checkpoint has them; "bf16": dequantised; others: quantised
    fp8_activations             products of prompts round inputs to float8 where weights are float8; on NVIDIA GPUs
    device                      "cpu", "cuda" or "npu", perhaps with an index: "npu:1"; "auto": the best there is
    prefix_cache                keep keys and values of past requests for those that begin alike; None: on CPUs and
                                GPUs, not on an NPU
    prefix_cache_scope          "tenant": each tenant finds its own alone; "server": all find all
    token_budget                most tokens in one step: prefill chunks and decode tokens together
    max_sequences               most sequences that run at the same time
    max_model_len_tokens        prompt + output of one request; None: the model's own limit. At most
                                `ModelSpec.longest_context_tokens`
    block_size_tokens           tokens per KV block; None: `default_block_size_tokens` of the device
    kv_bytes                    KV cache, allocated once
    state_bytes                 lines of state, allocated once; None: one line for each of max_sequences
    state_cache_bytes           further lines, whose states the prefix cache keeps, allocated once; None: a
                                sixth of kv_bytes, and of the memory that is for both; on an NPU 0
    prefix_host_bytes           host memory for blocks and states that leave the device, allocated once, pinned beside a
                                GPU; 0: none
    row_bytes                   LoRA rows on the device, allocated once; 0: LoRA is off
    side_bytes                  what adapters have on the device beside rows, allocated once: magnitudes, biases, norms,
                                embeddings and heads of their own; 0: those that have such are refused
    host_tier_bytes             adapters held in host memory, ready for the device
    num_threads                 threads of one matrix product; None: see `service.engine.process`
    max_steps_waiting_for_rows  after so many steps in which it was passed over, the oldest request that waits for rows
                                reserves them before newer ones, see `row_reservations.py`
    max_loads_ahead             requests' adapters that are read from disk, or wait in host memory for rows, at the
                                same time, beside the one of that oldest request
    max_prompt_logits           logits of prompt tokens (prompt logprobs) in one step; bounds the memory of a step
    eager                       capture no steps
    batch_invariant             a token's numbers do not depend on what else is in its step: `kernels.batch_invariant`
    lora_window                 hold LoRA's A behind the base weights, where the device has kernels for it, so that
                                small steps need no shrink of their own
    npu_graphs                  on an NPU capture decode steps of a few sizes, and replay them. Never tried on one yet
    overlap                     launch the next step before the last one is collected; None: on devices, not on a CPU
    stats_interval_seconds      shortest time between two Stats of a busy engine
    log_level, log_format       of the engine process, which logs to stderr
    """

    model_dir: str
    store_root: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["auto", "bf16", "fp8", "int8", "nf4"] = "auto"
    fp8_activations: bool = False
    device: str = "auto"
    prefix_cache: bool | None = None
    prefix_cache_scope: Literal["tenant", "server"] = "tenant"
    token_budget: int | None = None
    max_sequences: int | None = None
    max_model_len_tokens: int | None = None
    block_size_tokens: int | None = None
    kv_bytes: int | None = None
    state_bytes: int | None = None
    state_cache_bytes: int | None = None
    prefix_host_bytes: int = 0
    row_bytes: int | None = None
    side_bytes: int | None = None
    host_tier_bytes: int = 1024 * MIB
    num_threads: int | None = None
    max_steps_waiting_for_rows: int = 32
    max_loads_ahead: int = 4
    max_prompt_logits: int = 64
    eager: bool = False
    batch_invariant: bool = False
    lora_window: bool = True
    npu_graphs: bool = False
    overlap: bool | None = None
    stats_interval_seconds: float = 0.5
    log_level: str = "INFO"
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        for name in (
            "token_budget",
            "max_sequences",
            "block_size_tokens",
            "kv_bytes",
            "max_steps_waiting_for_rows",
            "max_loads_ahead",
            "max_prompt_logits",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        for name in ("row_bytes", "side_bytes", "host_tier_bytes", "state_cache_bytes", "prefix_host_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative.")
        if self.fp8_activations and self.batch_invariant:
            raise ValueError(
                "fp8_activations rounds a prompt's numbers by the size of its step, which batch_invariant rules out: "
                "leave out one of them."
            )
        # Each running sequence can then always get its decode token, and one of them a prefill token.
        if self.token_budget and self.max_sequences and self.token_budget < self.max_sequences:
            raise ValueError(
                f"token_budget ({self.token_budget}) must be at least max_sequences ({self.max_sequences}), since each "
                "running sequence takes one token per step."
            )


class EngineConfig(EngineOptions, frozen=True, kw_only=True):
    """Options with nothing left to decide: what an engine runs with."""

    device: str = "cpu"
    token_budget: int = 256
    max_sequences: int = 64
    block_size_tokens: int = 16
    kv_bytes: int = 512 * MIB
    row_bytes: int = 512 * MIB
    side_bytes: int = 0
    state_cache_bytes: int = 0


def has_prefix_cache(options: EngineOptions, device_type: str | None = None) -> bool:
    """Whether prefixes are kept, on this kind of device or that of the options. Copies of blocks were never tried on an
    NPU."""
    device_type = device_type or options.device.partition(":")[0]
    return device_type != "npu" if options.prefix_cache is None else options.prefix_cache


def default_block_size_tokens(device: str) -> int:
    """Small blocks waste least memory; an NPU's fused attention takes multiples of 128 only."""
    return 128 if device.partition(":")[0] == "npu" else 16
