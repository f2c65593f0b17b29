"""deploy/ray: what can be checked without Ray and a cluster. tests/ray_serve/test_application.py has Ray read it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from service.ray_serve.haproxy import ENVIRONMENT
from service.settings import load_settings

kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
SERVE = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
SERVICE = yaml.safe_load((ROOT / "deploy" / "ray" / "rayservice.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
GROUPS = CLUSTER["headGroupSpec"], WORKERS


def _arguments() -> dict[str, Any]:
    (application,) = SERVE["applications"]
    arguments: dict[str, Any] = application["args"]
    return arguments


def test_both_deploy_the_same_application() -> None:
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == SERVE


def test_the_settings_are_ours() -> None:
    load_settings(**_arguments()["settings"])


def test_the_version_of_ray_is_one_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = (ROOT / "tests" / "ray_serve" / "ray" / "requirements.in").read_text().strip()
    assert project["optional-dependencies"]["ray"] == [pinned]
    assert pinned == f"ray[serve]=={CLUSTER['rayVersion']}"
    assert f"'{pinned}'\n" in (ROOT / "deploy" / "ray" / "Dockerfile").read_text()
    assert f"ray=={CLUSTER['rayVersion']}\n" in (ROOT / "tests" / "ray_serve" / "ray" / "requirements.txt").read_text()


def test_every_process_of_ray_has_the_environment_that_is_tested() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for group in GROUPS:
        (container,) = group["template"]["spec"]["containers"]
        said = {one["name"]: one["value"] for one in container["env"]}
        assert said.pop("RAY_SERVE_ENABLE_HA_PROXY") == "1"
        assert Path(said.pop("RAY_SERVE_HAPROXY_BINARY_PATH")).name in scripts
        assert said == ENVIRONMENT


def test_the_image_with_ray_goes_by_pins_that_our_images_have() -> None:
    ours, with_ray = (ROOT / "Dockerfile").read_text(), (ROOT / "deploy" / "ray" / "Dockerfile").read_text()
    pins = set(re.findall(r"PINS=([\w.-]+)", with_ray))
    assert pins == {"constraints.txt", "constraints-npu.txt"}
    assert all(f"/opt/multilora/image/{one}" in ours for one in pins)
    images = {container["image"] for group in GROUPS for container in group["template"]["spec"]["containers"]}
    assert images == {"multilora:cuda-ray"} and "-t multilora:cuda-ray " in with_ray
    assert with_ray.rstrip().endswith(re.findall("USER [0-9]+", ours)[-1])


def test_ray_asks_who_uses_it_for_a_token() -> None:
    """Its default for clusters is to ask nobody, and its dashboard listens to all."""
    assert CLUSTER["authOptions"] == {"mode": "token"}


def test_kuberay_knows_each_field_and_calls_none_deprecated() -> None:
    schema = yaml.safe_load((Path(__file__).parent / "rayservice-spec.yaml").read_text())
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("ray.io/v1", "RayService")
    assert [error.message for error in Draft202012Validator(schema).iter_errors(SERVICE["spec"])] == []


@pytest.mark.parametrize("group", GROUPS, ids=["head", "workers"])
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_pods_are_valid(group: dict[str, Any], version: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": group["template"]["spec"]}
    kubernetes_validate.validate(pod, version, strict=True)


def test_each_worker_has_what_an_engine_asks_for_and_there_are_enough() -> None:
    arguments = _arguments()
    (container,) = WORKERS["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == arguments["num_gpus"]
    assert int(container["resources"]["requests"]["cpu"]) >= arguments["num_cpus"]
    assert (WORKERS["minReplicas"], WORKERS["maxReplicas"]) == (arguments["engines"], arguments["max_engines"])
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert any(arguments["settings"]["store_dir"].startswith(path) for path in mounted)
