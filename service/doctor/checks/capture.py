"""The step that captures: decode steps of a single layer, eager and captured, must give the same tokens."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from service.doctor.checks.probe_engine import Subject, build_subject, names, run_to_the_end
from service.doctor.checks.step_process import StepFailed, StepHost

_NUM_REQUESTS, _NUM_TOKENS = 4, 8
_KV_BYTES, _ROW_BYTES = 512 << 20, 256 << 20


def capture_one_layer(host: StepHost) -> None:
    """The model's first attention layer between its embeddings and its head, with LoRA."""
    with tempfile.TemporaryDirectory(prefix="multilora-doctor-") as directory:
        layer = one_layer(Path(host.options["model_dir"]), Path(directory))
        host.facts(layer=layer)
        sizes: dict[str, Any] = {
            "model_dir": directory,
            "token_budget": 64,
            "max_sequences": _NUM_REQUESTS,
            "lora_window": False,
            # The first of two engines may not be freed yet when the second is built.
            "kv_bytes": _KV_BYTES,
            "row_bytes": _ROW_BYTES,
        }
        tokens: dict[str, dict[str, list[int]]] = {}
        for name, eager in (("eager", True), ("captured", False)):
            host.tell(f"{name} steps")
            subject = build_subject(host, **sizes, eager=eager, npu_graphs=not eager)
            tokens[name] = _tokens(subject)
            if not eager:
                captured = subject.engine.runner.captured
                host.facts(replayed=captured.num_replayed, graphs=captured.num_graphs, eager=dict(captured.eager))
                if not captured.num_replayed:
                    raise StepFailed(f"No step was captured: {', '.join(captured.eager) or 'nothing was run'}.")
            subject.engine.close()
        if tokens["eager"] != tokens["captured"]:
            raise StepFailed("Captured steps gave other tokens than eager ones.")


def _tokens(subject: Subject) -> dict[str, list[int]]:
    """By request, of the base and of two adapters."""
    work = [
        *subject.requests(_NUM_REQUESTS // 2, (), _NUM_TOKENS),
        *subject.requests(_NUM_REQUESTS, names(2), _NUM_TOKENS)[_NUM_REQUESTS // 2 :],
    ]
    return run_to_the_end(subject.engine, work).tokens


def one_layer(model_dir: Path, directory: Path) -> int:
    """A model directory of one layer, its other files where they are; returns which layer it is.

    Weights are taken by their layer's number, so it is the first; a model whose first layer has no attention keeps as
    many as lead to one.
    """
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_bytes())
    text = config.get("text_config", config)
    kinds = text.get("layer_types") or ["full_attention"]
    layer = next((index for index, kind in enumerate(kinds) if "attention" in kind and "linear" not in kind), 0)
    text["num_hidden_layers"] = layer + 1
    if text.get("layer_types"):
        text["layer_types"] = kinds[: layer + 1]
    (directory / "config.json").write_text(json.dumps(config))
    for path in model_dir.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path.resolve())
    return layer
