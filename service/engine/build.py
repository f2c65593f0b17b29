"""Puts an engine together from its configuration: model, rows, host tier, caches. Used by the process and by tests."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import torch

from adapters.host_tier import HostTier
from adapters.row_pool import RowPool
from kernels.lora.limits import MAX_KERNEL_RANK
from kernels.platform import Platform, detect, find_device, in_use, prepare
from kernels.probe.choose import choose_implementations
from kernels.probe.shapes import ProbeShapes
from service.engine.adapter_desk import HostSource
from service.engine.brief_thread import BriefThread
from service.engine.config import EngineConfig, EngineOptions, default_block_size_tokens
from service.engine.engine import Engine
from service.engine.messages import OpInUse
from service.engine.runner import ModelRunner
from service.models.caches import kv_bytes_per_token
from service.models.checkpoint import OpenTensors, open_checkpoint
from service.models.facts import model_facts, read_config
from service.models.loader import choose_dtype, load_model

log = logging.getLogger(__name__)


def build_engine(
    options: EngineOptions, *, open_tensors: OpenTensors = open_checkpoint, adapters: HostSource | None = None
) -> Engine:
    """Decide what the options leave open, probe the ops, load the model and allocate everything. Raises ValueError with
    one sentence if the engine cannot start.

    open_tensors  where the base model's tensors come from
    adapters      where adapters come from; None: a host tier over the store of the options
    """
    device = find_device(options.device)
    if device != options.device:
        log.info("device: %s, the best that was found (--device names another)", device)
    prepare(device)
    config = decide(options, device)
    platform, reports = choose_implementations(config.device, shapes_to_probe(config))
    loaded = load_model(Path(config.model_dir), dtype=config.dtype, device=config.device, open_tensors=open_tensors)
    rows: RowPool | None = None
    host: HostSource | None = None
    if config.row_bytes > 0:
        row_dtype = platform.row_dtype(loaded.dtype)
        rows = RowPool(
            loaded.layout,
            config.row_bytes,
            dtype=row_dtype,
            device=loaded.device,
            alignment=platform.row_alignment,
            max_rank=max_rank_of(platform),
        )
        host = adapters or HostTier(Path(config.store_root), loaded.layout, config.host_tier_bytes, dtype=row_dtype)
        loaded.model.bind_rows(rows)
    ops = tuple(OpInUse(report.op, report.used or "", report.wished) for report in reports)
    loader = BriefThread("adapter-loader")
    return Engine(ModelRunner(loaded, config, platform), rows, host, config, ops, loader=loader)


def decide(options: EngineOptions, device: str) -> EngineConfig:
    """The options with what they leave open decided for the device, "cuda:1" say."""
    decided = {
        "device": device,
        "block_size_tokens": options.block_size_tokens or default_block_size_tokens(device),
    }
    return EngineConfig(**(msgspec.structs.asdict(options) | decided))


def max_rank_of(platform: Platform) -> int | None:
    """The largest rank that the LoRA kernels of the device take; None on a CPU, where any rank will do."""
    return None if platform.device == "cpu" else MAX_KERNEL_RANK


def shapes_to_probe(config: EngineConfig) -> ProbeShapes:
    """Sizes of the model and its cache, as they will be served. Raises ModelError, and BackendError for a device that
    is not there."""
    detect(config.device)  # torch's own error is no sentence
    model_dir = Path(config.model_dir)
    facts = model_facts(read_config(model_dir))
    with open_checkpoint(model_dir) as checkpoint:
        dtype, _ = choose_dtype(config.dtype, config.device, facts, checkpoint)
    windows = [window for window in facts.sliding_windows if window is not None]
    return ProbeShapes(
        dtype=_name(dtype),
        row_dtype=_name(in_use(torch.device(config.device)).row_dtype(dtype)),
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        sliding_window=min(windows, default=None),
        conv_width=facts.conv_width,
        block_size=config.block_size_tokens,
        num_blocks=1 + config.kv_bytes // (kv_bytes_per_token(facts, dtype) * config.block_size_tokens),
        max_sequences=config.max_sequences,
        norm_eps=facts.norm_eps,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
