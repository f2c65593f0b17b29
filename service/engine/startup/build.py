"""Puts an engine together from its configuration: model, rows, host tier, caches. Used by the process and by tests."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec
import torch

from adapters.memory.host_tier import HostTier
from adapters.memory.row_pool import RowPool
from adapters.row_plan import EXPERTS_SHARE, non_lora_unit_bytes, row_bytes
from kernels.batch_invariant.mode import install_batch_invariance, refuse_fallbacks, refuse_model
from kernels.compile_ahead import warm_up_ahead
from kernels.lora import MAX_KERNEL_RANK
from kernels.platform import BackendError, Platform, detect, find_device, in_use, prepare
from kernels.probe.isolated import choose_implementations
from kernels.probe.op_reports import OpReport
from kernels.probe.probe_process import ProbeProcess
from kernels.shapes import ProbeShapes
from service.engine.engine import Engine
from service.engine.ipc.config import EngineConfig, EngineOptions
from service.engine.ipc.messages import OpInUse
from service.engine.loras.interfaces import HostSource, Loader
from service.engine.model.graphs import Graphs
from service.engine.model.runner import ModelRunner
from service.engine.startup.budgets import (
    TRIAL_BLOCKS,
    Budgets,
    ModelSizes,
    budgets_behind_graphs,
    decide_budgets,
    measure_graphs,
    sentences,
    shown,
)
from service.engine.transient_thread import TransientThread
from service.grammars.matching import GrammarError, TokenTable
from service.machine import memory_bytes
from service.models.checkpoint.checkpoint import OpenTensors, open_checkpoint
from service.models.families import model_spec
from service.models.layers.caches import kv_bytes_per_token, state_bytes_per_line
from service.models.layouts import layout_of_spec
from service.models.loader import LoadedModel, choose_dtype, load_model
from service.models.spec.config_json import read_config
from service.models.spec.model_spec import ModelSpec, ShortConvSpec
from service.models.spec.quantisation import quantisation_of

# Beside a device, whose engine leaves the processor's other cores alone.
_MAX_READ_THREADS = 4


class Preparations:
    """Begins at once: the tokens that grammars need, and on a GPU the imports of what serves its ops."""

    def __init__(self, device: str, model_dir: Path) -> None:
        thread = ThreadPoolExecutor(1, "preparations")
        if torch.device(device).type == "cuda":
            thread.submit(_import_implementations, torch.device(device))
        self._tokens: Future[TokenTable | None] = thread.submit(_token_table, model_dir)
        thread.shutdown(wait=False)

    def tokens(self) -> TokenTable | None:
        """None, with the reason in the log, for a model whose tokenizer does not tell. Waits for it."""
        return self._tokens.result()


def _import_implementations(device: torch.device) -> None:
    """Import the implementations in use; the probe reports those that cannot be. Triton hashes its own files once."""
    for op, name in in_use(device).implementations.items():
        with suppress(Exception):
            importlib.import_module(f"kernels.{op}.{name}")
    with suppress(ImportError, AttributeError):
        importlib.import_module("triton.runtime.cache").triton_key()


def _token_table(model_dir: Path) -> TokenTable | None:
    try:
        return TokenTable.load(model_dir)
    except GrammarError as error:
        log.info("no grammars: %s", error)
        return None


log = logging.getLogger(__name__)

# Expected memory of captured steps, used to size rows, until it is measured.
GRAPH_BYTES = 2 << 30
# About free memory that an ended process releases.
_READ_INTERVAL_SECONDS, _SETTLED_READS, _MAX_READS = 0.05, 2, 40
# To bring an adapter from disk to the device, in times of bringing it from host memory. Not measured on a GPU: an NVMe
# disk gives 5 GB/s or so, pinned memory ten times that.
COST_OF_READING = 10.0


def build_engine(
    options: EngineOptions,
    *,
    open_tensors: OpenTensors = open_checkpoint,
    adapters: HostSource | None = None,
    graphs: Graphs | None = None,
    loader: Loader | None = None,
    probing: ProbeProcess | None = None,
    free_bytes: Callable[[str], int] = lambda device: free_memory_bytes(device),
) -> Engine:
    """Probe the ops, load the model, decide what the options leave open, and allocate everything. Raises ValueError
    with one sentence if the engine cannot start.

    open_tensors  where the base model's tensors come from
    adapters      where adapters come from; None: a host tier over the store of the options
    graphs        how steps are captured; None: the device's own way, if it has one
    loader        reads adapters and compiles grammars; None: a thread for each, while there is something to do
    probing       a process that was started to probe the ops of an accelerator; it is closed
    free_bytes    of a device, now
    """
    device = find_device(options.device)
    if device != options.device:
        log.info("device: %s, the best that was found (--device names another)", device)
    if options.fp8_activations and device.partition(":")[0] != "cuda":  # torch may not know "npu" yet
        raise BackendError("--fp8-activations is served on NVIDIA GPUs alone: serve without it.")
    prepare(device)
    install_batch_invariance(device, wanted=options.batch_invariant)
    # Before the weights are loaded, caches are as large as they can come to be.
    expected, _ = decide(options, device, free_bytes=free_bytes)
    refuse_model(in_use(torch.device(device)), shapes_to_probe(expected))
    beside = Preparations(device, Path(options.model_dir))

    def load() -> tuple[LoadedModel, HostSource]:
        loaded = load_model(
            Path(options.model_dir),
            dtype=options.dtype,
            weights=options.weights,
            device=device,
            rounds_prompts=options.fp8_activations,
            open_tensors=open_tensors,
            free_bytes=free_bytes(device) if device == "cpu" else None,
        )
        return loaded, adapters or _host_tier(expected, loaded)

    (platform, reports), (loaded, host) = _probe_and_load(device, shapes_to_probe(expected), probing, load)
    refuse_fallbacks(platform)
    config, reasons = decide(options, device, free_bytes=partial(_free_behind_the_probe, free_bytes))
    rows: RowPool | None = None
    if config.row_bytes > 0:
        rows = RowPool(
            loaded.layout,
            config.row_bytes,
            dtype=platform.row_dtype(loaded.dtype),
            device=loaded.device,
            alignment=platform.row_alignment,
            max_rank=max_rank_of(platform),
            rows_behind=loaded.model.rows_behind if config.lora_window and not config.batch_invariant else None,
            side_bytes=config.side_bytes,
            base=loaded.model,
            cost_per_row=partial(_cost_per_row, host),
        )
        loaded.model.bind_rows(rows)
    ops = tuple(one for report in reports for one in _in_use(report))
    if options.kv_bytes is None:
        trial = ModelRunner(loaded, config, platform, graphs, num_kv_blocks=TRIAL_BLOCKS)
        is_capturing = not trial.captured.is_off
        graph_bytes = _graph_bytes(trial, rows, config, partial(free_bytes, device)) if is_capturing else 0
        del trial  # with its graphs and caches
        if is_capturing:
            config, reasons = _decide_behind_graphs(options, config, free_bytes(device), graph_bytes)
    for reason in reasons:
        log.info("%s", reason)
    runner = ModelRunner(loaded, config, platform, graphs)
    adapter_loader = loader or TransientThread("adapter-loader")
    source, tokens = None if rows is None else host, beside.tokens()
    return Engine(runner, rows, source, config, ops, loader=adapter_loader, tokens=tokens, compiler=loader)


def _host_tier(config: EngineConfig, loaded: LoadedModel) -> HostTier:
    """Takes a third of a second for each GiB that a device is to copy from."""
    on_cpu = loaded.device.type == "cpu"
    return HostTier(
        Path(config.store_root),
        loaded.layout,
        config.host_tier_bytes if config.row_bytes > 0 else 0,
        dtype=in_use(loaded.device).row_dtype(loaded.dtype),
        is_pinned=not on_cpu,
        num_threads=1 if on_cpu else min(_MAX_READ_THREADS, os.cpu_count() or 1),
    )


def _probe_and_load(
    device: str, shapes: ProbeShapes, probing: ProbeProcess | None, load: Callable[[], tuple[LoadedModel, HostSource]]
) -> tuple[tuple[Platform, tuple[OpReport, ...]], tuple[LoadedModel, HostSource]]:
    """Both at once on an accelerator, whose ops another process probes.

    Weights of experts, and quantised ones, are packed for what serves them, so they are loaded when that is known.
    """
    if torch.device(device).type == "cpu" or shapes.experts is not None or shapes.is_quantised:
        return choose_implementations(device, shapes, probing), load()
    with ThreadPoolExecutor(1, "probe") as thread:
        choosing = thread.submit(choose_implementations, device, shapes, probing)
        loaded = load()
    return choosing.result(), loaded


def _in_use(report: OpReport) -> list[OpInUse]:
    """The op, and those of its regimes that something else serves, as "op/regime"."""
    others = [OpInUse(f"{report.op}/{regime}", name or "", report.wished) for regime, name in report.regimes.items()]
    return [OpInUse(report.op, report.used or "", report.wished), *others]


def _cost_per_row(host: HostSource, digest: str) -> float:
    """The cost of bringing an adapter to the device again: a copy, or a read and a copy."""
    return 1.0 if host.is_kept(digest) else COST_OF_READING


def decide(
    options: EngineOptions,
    device: str,
    weight_bytes: int = 0,
    *,
    free_bytes: Callable[[str], int] = lambda device: free_memory_bytes(device),
) -> tuple[EngineConfig, list[str]]:
    """The options with what they leave open decided for the device, "cuda:1" say, from the memory that is free on it
    now; and why, in a few lines for people. Raises ModelError, and BackendError for a device that is not there.

    weight_bytes  of a model that is still to be loaded
    """
    detect(device)  # torch's own error is no sentence
    sizes, num_free = sizes_of(options, device), max(free_bytes(device) - weight_bytes, 0)
    kind = device.partition(":")[0]
    is_capturing = kind == "cuda" or (kind == "npu" and options.npu_graphs)
    graph_bytes = GRAPH_BYTES if is_capturing and not options.eager else 0
    budgets = decide_budgets(options, sizes, kind, num_free, graph_bytes=graph_bytes)
    return _decided(options, device, budgets), sentences(options, budgets, sizes, device, num_free)


def _decided(options: EngineOptions, device: str, budgets: Budgets) -> EngineConfig:
    decided = {"device": device, **asdict(budgets)}
    del decided["step_bytes"]
    return EngineConfig(**(msgspec.structs.asdict(options) | decided))


def _decide_behind_graphs(
    options: EngineOptions, config: EngineConfig, num_free: int, graph_bytes: int
) -> tuple[EngineConfig, list[str]]:
    """As `decide`, with the KV cache that rows, which are allocated, and graphs, which were measured, leave."""
    device = config.device
    sizes, num_before = sizes_of(options, device), num_free + config.row_bytes + config.side_bytes
    budgets = budgets_behind_graphs(options, config, sizes, device.partition(":")[0], num_before, graph_bytes)
    reasons = sentences(options, budgets, sizes, device, num_before)
    return _decided(options, device, budgets), [*reasons, f"captured steps: {shown(graph_bytes)}, as measured"]


def _graph_bytes(trial: ModelRunner, rows: RowPool | None, config: EngineConfig, free_bytes: Callable[[], int]) -> int:
    """Memory that captured steps will take; the kernels compiled for it are found again by the engine."""
    warm_up_ahead(lambda: trial.warm_up(config), config.device.partition(":")[0])
    return measure_graphs(trial, rows, config, free_bytes)


def _free_behind_the_probe(free_bytes: Callable[[str], int], device: str) -> int:
    """An NPU's driver may take back late what the probe's process has held, hundreds of MB of its context."""
    read = partial(free_bytes, device)
    return settled(read) if device.partition(":")[0] == "npu" else read()


def settled(read: Callable[[], int], wait: Callable[[float], None] = time.sleep) -> int:
    """The value of `read` once it has not grown for two reads, or after two seconds."""
    most, num_same = read(), 0
    for _ in range(_MAX_READS):
        wait(_READ_INTERVAL_SECONDS)
        now = read()
        num_same = num_same + 1 if now <= most else 0
        most = max(most, now)
        if num_same == _SETTLED_READS:
            break
    return now


def free_memory_bytes(device: str) -> int:
    """Free memory of the device; for a CPU the memory available to the machine and to this process's control group."""
    if torch.device(device).type == "cpu":
        return memory_bytes()[1]
    module = torch.get_device_module(torch.device(device))
    module.empty_cache()
    return int(module.mem_get_info(torch.device(device))[0])


def sizes_of(options: EngineOptions, device: str) -> ModelSizes:
    """Bytes of the model's caches and steps, in the dtypes that it is served in. Raises ModelError."""
    spec, dtype = _spec_and_dtype(options, device)
    platform = in_use(torch.device(device))
    layout, row_element_bytes = layout_of_spec(spec), platform.row_dtype(dtype).itemsize
    layers_share = 1 - EXPERTS_SHARE if layout.experts else 1.0
    rows, units = row_bytes(layout, row_element_bytes), non_lora_unit_bytes(layout, row_element_bytes)
    return ModelSizes(
        kv_bytes_per_token=kv_bytes_per_token(spec, dtype),
        state_bytes_per_line=state_bytes_per_line(spec, dtype),
        row_bytes=int(sum(rows[group] for group in rows if group not in ("embeddings", "experts")) / layers_share),
        non_lora_line_bytes=units["vectors"] + units["norms"],
        non_lora_table_bytes=units["saved_embedding"] + units["saved_head"],
        # The residual stream, its norm, a projection's output and what is computed from that; LoRA's h and maps.
        bytes_per_step_token=4 * (spec.hidden_size + spec.widest_projection) * dtype.itemsize,
        logits_bytes=4 * spec.vocab_size,
        context_tokens=options.max_model_len_tokens or spec.context_tokens,
        max_kv_tokens=_max_kv_tokens(spec, platform),
    )


def _max_kv_tokens(spec: ModelSpec, platform: Platform) -> int | None:
    """Tokens of a cache, the null block's among them, that the platform's attention takes in its widest layer."""
    most, widest = platform.max_cache_elements, max((a.num_kv_heads * a.head_dim for a in spec.attentions), default=0)
    return None if most is None or not widest else most // widest


def max_rank_of(platform: Platform) -> int | None:
    """The largest rank that the LoRA kernels of the device take; None on a CPU, where any rank will do."""
    return None if platform.device == "cpu" else MAX_KERNEL_RANK


def shapes_to_probe(config: EngineConfig) -> ProbeShapes:
    """Sizes of the model and its cache, as they will be served. Raises ModelError."""
    spec, dtype = _spec_and_dtype(config, config.device)
    attention = max(spec.attentions, key=lambda one: one.head_dim)
    windows = [one.sliding_window for one in spec.attentions if one.sliding_window is not None]
    return ProbeShapes(
        dtype=_name(dtype),
        row_dtype=_name(in_use(torch.device(config.device)).row_dtype(dtype)),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        intermediate_size=max((mlp.size for mlp in spec.mlps), default=max((m.size for m in spec.moes), default=0)),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rotary_dim=spec.rotations[attention.rotary].rotary_dim(attention.head_dim),
        has_output_gate=attention.has_output_gate,
        activation=next((mlp.activation for mlp in spec.mlps), next((moe.activation for moe in spec.moes), "silu")),
        is_quantised=_is_quantised(config),
        exact_norms=spec.zero_centred_norms or spec.exact_norms,
        sliding_window=min(windows, default=None),
        score_cap=next((one.score_cap for one in spec.attentions if one.score_cap is not None), None),
        has_sinks=any(one.has_sinks for one in spec.attentions),
        conv_width=max((conv.width for conv in spec.convs), default=0),
        conv_size=max((conv.size for conv in spec.convs if not isinstance(conv, ShortConvSpec)), default=None),
        delta=next(((d.num_key_heads, d.num_value_heads, d.key_dim, d.value_dim) for d in spec.deltas), None),
        mamba2=next(((m.num_groups, m.num_heads, m.state_size, m.head_dim) for m in spec.mambas), None),
        experts=next(((moe.num_experts, moe.num_chosen, moe.size) for moe in spec.moes), None),
        has_expert_biases=any(moe.interleaved for moe in spec.moes),
        block_size=config.block_size_tokens,
        num_blocks=1 + config.kv_bytes // (kv_bytes_per_token(spec, dtype) * config.block_size_tokens),
        max_sequences=config.max_sequences,
        norm_eps=spec.norm_eps,
    )


def _is_quantised(config: EngineConfig) -> bool:
    """Whether weights may be held in codes."""
    if config.weights == "auto":
        return quantisation_of(read_config(Path(config.model_dir))) is not None
    return config.weights != "bf16"


def _spec_and_dtype(options: EngineOptions, device: str) -> tuple[ModelSpec, torch.dtype]:
    model_dir = Path(options.model_dir)
    spec = model_spec(read_config(model_dir))
    with open_checkpoint(model_dir) as checkpoint:
        return spec, choose_dtype(options.dtype, device, spec, checkpoint)[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
