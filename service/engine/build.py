"""Puts an engine together from its configuration: model, rows, host tier, caches. Used by the process and by tests."""

from __future__ import annotations

from pathlib import Path

from adapters.host_tier import HostTier
from adapters.row_pool import RowPool
from kernels.platform import detect
from service.engine.config import EngineConfig
from service.engine.engine import Engine
from service.engine.runner import ModelRunner
from service.models.loader import load_model


def build_engine(config: EngineConfig) -> Engine:
    """Load the model and allocate everything. Raises ValueError with one sentence if the engine cannot start."""
    platform = detect(config.device)
    loaded = load_model(Path(config.model_dir), dtype=config.dtype, device=config.device)
    rows: RowPool | None = None
    host: HostTier | None = None
    if config.row_bytes > 0:
        row_dtype = platform.row_dtype(loaded.dtype)
        rows = RowPool(
            loaded.layout,
            config.row_bytes,
            dtype=row_dtype,
            device=loaded.device,
            alignment=platform.row_alignment,
        )
        host = HostTier(Path(config.store_root), loaded.layout, config.host_tier_bytes, dtype=row_dtype)
        loaded.model.bind_rows(rows)
    return Engine(ModelRunner(loaded, config, platform), rows, host, config)
