"""Sections on the model directory, an adapter's way to the device, and the adapter store."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.doctor.report import Examination, Section, Skipped
from service.settings import BUNDLED_MODEL_DIR

if TYPE_CHECKING:
    from service.models.spec.model_spec import ModelSpec

_RANK = 16
_MIB = 2**20
# Most tensors with faults that are named; the others are counted.
_MOST_FAULTS = 20


def look_at_model(examination: Examination) -> Section:
    """The model directory, and whether its weights fit the device."""
    from service.engine.startup.build import decide, shapes_to_probe
    from service.models.families import model_spec
    from service.models.layouts import weight_files
    from service.models.spec.config_json import ModelError, read_config

    settings = examination.settings
    section = Section("model", "Model")
    section.facts["directory"] = str(settings.model_dir)
    section.facts["bundled"] = settings.model_dir.resolve() == BUNDLED_MODEL_DIR
    try:
        spec = model_spec(read_config(settings.model_dir))
        weight_bytes = sum(path.stat().st_size for path in weight_files(settings.model_dir))
        section.facts |= {
            "type": spec.model_type,
            "num_layers": spec.num_layers,
            "num_conv_layers": len(spec.convs),
            "hidden_size": spec.hidden_size,
            "weight_bytes": weight_bytes,
        }
        if not _compare_tensors(section, settings.model_dir, spec):
            return section
        if examination.platform is not None:
            examination.config, _ = decide(settings.engine_options(), examination.device, weight_bytes)
            examination.shapes = shapes_to_probe(examination.config)
            section.facts["dtype"] = examination.shapes.dtype
    except ModelError as error:
        _refuse(section, str(error))
        return section
    _compare_memory(section, examination, weight_bytes)
    return section


def time_adapter(examination: Examination) -> Section:
    """An adapter of rank 16 on every linear projection: checked and stored, read to the host, loaded to the device."""
    import torch

    from adapters.errors import AdapterError
    from adapters.memory.host_tier import HostTier
    from adapters.memory.row_pool import RowPool
    from adapters.store.store import AdapterStore, StoreLimits
    from service.models.layouts import layout_in

    section, settings = Section("adapter", "Adapter"), examination.settings
    if examination.shapes is None or examination.config is None or examination.platform is None:
        raise Skipped("there is no device or no model")
    if not settings.lora_enabled:
        raise Skipped("adapter_row_bytes is 0, which turns LoRA off")
    layout, device = layout_in(settings.model_dir), torch.device(examination.device)
    with tempfile.TemporaryDirectory(prefix="multilora-doctor-") as directory:
        root = Path(directory)
        num_modules, num_bytes = _write_adapter(root / "peft", layout)
        limits = StoreLimits(free_disk_floor_bytes=0)
        store = AdapterStore(root / "store", layout, limits, base_name="base", base_dir=settings.model_dir)
        try:
            clock = _Clock()
            with store.begin() as upload:
                upload.add_directory(root / "peft")
                record, _ = upload.finish("doctor")
            upload_seconds = clock.lap()
            row_dtype = examination.shapes.torch_row_dtype
            tier = HostTier(root / "store", layout, num_bytes * 4, dtype=row_dtype, is_pinned=device.type != "cpu")
            clock.lap()
            host = tier.get(record.digest)
            read_seconds = clock.lap()
            rows = RowPool(layout, examination.config.row_bytes, dtype=row_dtype, device=device,
                           alignment=examination.platform.row_alignment)  # fmt: skip
            wait = torch.get_device_module(device).synchronize
            wait()
            clock.lap()
            rows.load(record.digest, host)
            wait()
            load_seconds = clock.lap()
        except AdapterError as error:
            section.find("warning", "adapter-refused", f"{_sentence(error)}", "Raise --adapter-row-bytes.")
            return section
        finally:
            store.close()
    section.facts = {
        "rank": _RANK,
        "num_modules": num_modules,
        "file_bytes": num_bytes,
        "device_bytes": rows.usage().bytes_used,
        "check_and_store_seconds": upload_seconds,
        "disk_to_host_seconds": read_seconds,
        "host_to_device_seconds": load_seconds,
    }
    return section


def look_at_store(examination: Examination) -> Section:
    """Whether uploads can be written where the server would write them. Creates nothing that stays."""
    settings = examination.settings
    section, root = Section("store", "Adapter store"), settings.store_root
    floor_bytes = int(settings.min_free_disk_bytes)
    existing = next(path for path in (root, *root.parents) if path.exists())
    section.facts = {"directory": str(root), "exists": root.is_dir(), "writable": False, "min_free_bytes": floor_bytes}
    cure = "Set --store-dir (MULTILORA_STORE_DIR) to a directory that this user may write."
    if not existing.is_dir():
        section.find("error", "store-unwritable", f"{existing} is not a directory.", cure)
        return section
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"multilora")
        section.facts["writable"] = True
    except OSError as error:
        section.find("error", "store-unwritable", f"{existing} cannot be written: {error.strerror}.", cure)
        return section
    free_bytes = shutil.disk_usage(existing).free
    section.facts["free_bytes"] = free_bytes
    if free_bytes < floor_bytes:
        section.find(
            "warning", "store-full",
            f"{free_bytes // _MIB} MiB are free in {existing}; uploads are refused below {floor_bytes // _MIB} MiB.",
            "Free disk space, or lower --min-free-disk-bytes.",
        )  # fmt: skip
    return section


def _compare_tensors(section: Section, model_dir: Path, spec: ModelSpec) -> bool:
    """Finds every tensor that is missing, misshapen or not used; none is read. Returns whether the model can be loaded.
    Raises ModelError."""
    from service.models.checkpoint.checkpoint import compare, open_checkpoint

    with open_checkpoint(model_dir) as checkpoint:
        found = compare(spec, checkpoint)
    if found.not_served:
        section.facts["not_served"] = ", ".join(f"{prefix}*" for prefix in found.not_served)
    for fault in found.faults[:_MOST_FAULTS]:
        _refuse(section, fault)
    if len(found.faults) > _MOST_FAULTS:
        _refuse(section, f"{len(found.faults) - _MOST_FAULTS} more tensors are missing or do not fit")
    if found.warning is not None:
        cure = "Take config.json and the weights from one download."
        section.find("warning", "tensors-unused", _sentence(found.warning), cure)
    return not found.faults


def _refuse(section: Section, why: str) -> None:
    section.find("error", "model-refused", _sentence(why), "Name another --model-dir, or repair this one.")


def _compare_memory(section: Section, examination: Examination, weight_bytes: int) -> None:
    """Weights as they are stored, and the three budgets, against what is free. A rough sum, so no error."""
    config, free = examination.config, examination.memory_free_bytes
    if config is None:
        return
    needed = weight_bytes + config.kv_bytes + config.row_bytes + config.side_bytes + (config.state_bytes or 0)
    needed += config.state_cache_bytes
    section.facts["planned_bytes"] = needed
    if free is not None and needed > free:
        section.find(
            "warning", "memory-short",
            f"Weights and budgets come to {needed // _MIB} MiB, and {free // _MIB} MiB are free on the device.",
            "Lower --kv-bytes or --adapter-row-bytes, or end what else uses the device.",
        )  # fmt: skip


def _write_adapter(directory: Path, layout: Any) -> tuple[int, int]:
    """A PEFT directory with random weights. Returns the number of its modules and of its tensors' bytes."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    linear = [one for one in layout.projections if one.kind == "linear" and one.layer >= 0]
    for projection in linear:
        for piece in projection.slices:
            name = f"base_model.model.{piece.module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(_RANK, projection.in_features, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(piece.out_features, _RANK, generator=generator)
    tensors = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({piece.module.rpartition(".")[2] for projection in linear for piece in projection.slices})
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return len(tensors) // 2, sum(tensor.nbytes for tensor in tensors.values())


class _Clock:
    """Seconds from lap to lap."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def _sentence(error: Exception | str) -> str:
    text = str(error).rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."
