"""deploy/compose.yaml: valid for the Compose specification's schema, and what it says of the image is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import Settings
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())["services"]["multilora"]


def _check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def test_valid_for_the_compose_specification(tmp_path: Path) -> None:
    checked = _check(COMPOSE)
    assert checked.returncode == 0, checked.stdout
    broken = tmp_path / "compose.yaml"
    broken.write_text(COMPOSE.read_text().replace("stop_grace_period", "stop_grace_time"))
    assert _check(broken).returncode != 0


def test_every_variable_is_a_setting(service: dict[str, Any]) -> None:
    known = {f"MULTILORA_{name.upper()}" for name in Settings.model_fields}
    assert service["environment"].keys() <= known


@pytest.mark.parametrize("name", ["MULTILORA_API_KEYS", "MULTILORA_ADMIN_API_KEYS"])
def test_keys_are_passed_on_only_where_the_host_has_them(service: dict[str, Any], name: str) -> None:
    """Without a value, Compose takes the host's, and sets nothing where there is none; a server refuses empty ones."""
    assert service["environment"][name] is None


def test_grace_period_is_longer_than_the_shutdown_limit(service: dict[str, Any]) -> None:
    limit_seconds = float(service["environment"]["MULTILORA_SHUTDOWN_LIMIT_SECONDS"])
    assert float(service["stop_grace_period"].removesuffix("s")) >= limit_seconds + 10


def test_what_the_image_keeps_is_in_volumes(service: dict[str, Any]) -> None:
    targets = {volume.rsplit(":", 1)[1] for volume in service["volumes"] if not volume.endswith(":ro")}
    kept = re.findall(r"^VOLUME (\[.*\])$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[-1]
    assert targets == set(yaml.safe_load(kept))
