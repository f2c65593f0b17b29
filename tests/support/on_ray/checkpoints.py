"""What servers on Ray have in their tests."""

from __future__ import annotations

from pathlib import Path

from tests.support.models.tiny_models import make_adapter, make_tiny_model

NAMES = [f"adapter-{seed}" for seed in range(4)]


def make_checkpoints(root: Path) -> None:
    """A tiny model in `base`, adapters of it in `adapters`, called NAMES, and one to be uploaded in `uploaded`."""
    base = make_tiny_model("llama", root / "base", max_position_embeddings=16_384)
    for seed, name in enumerate([*NAMES, "uploaded"]):
        folder = root / ("adapters" if name in NAMES else ".")
        make_adapter(base, folder / name, rank=4, target_modules=["q_proj", "v_proj"], seed=seed)
