"""docs/ascend.md speaks of settings, files and versions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from service.settings import Settings
from tests.deploy.test_image_parts import pins

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "ascend.md").read_text()


def test_every_variable_is_a_setting() -> None:
    named = set(re.findall(r"MULTILORA_[A-Z_]+", TEXT))
    assert named
    assert named <= {f"MULTILORA_{name.upper()}" for name in Settings.model_fields}


def test_every_file_exists() -> None:
    named = set(re.findall(r"(?:deploy|docs|tests)/[\w./-]*\w|constraints[\w-]*\.txt", TEXT))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_versions_are_the_pinned_ones() -> None:
    for name in ("torch", "torch-npu", "triton-ascend"):
        (line,) = re.findall(rf"^\| {name.replace('-npu', '_npu')} \| ([\d.]+)", TEXT, flags=re.MULTILINE)
        assert line == pins("constraints-npu.txt")[name]
    base = re.search(r"NPU_BASE=quay\.io/ascend/cann:(\S+)", (ROOT / "Dockerfile").read_text())
    assert base is not None
    assert f"(the default) | `{base[1]}`" in TEXT


def test_the_container_gets_what_compose_gives_it() -> None:
    service = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["multilora"]
    for volume in service["volumes"]:
        if volume.startswith("/"):
            assert f"-v {volume}" in TEXT
    for device in service["devices"][1:]:
        assert f"--device {device}" in TEXT
