"""`multilora doctor` on a CPU: exit codes, the JSON of a bug report, injected faults, absent devices."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kernels.platform import IMPLEMENTATIONS
from service.doctor.checks.sections import look_at
from service.doctor.report import Examination, Section
from service.settings import load_settings
from tests.doctor.conftest import BROKEN_OPS, BUNDLED, ROOT, visit

_NUMBER = {"type": ["number", "null"]}
_TEXT = {"type": ["string", "null"]}
_TRIAL = {
    "case": {"type": "string"},
    "implementation": {"type": "string"},
    "status": {"enum": ["ok", "missing", "refused", "raised", "differs", "crashed", "hung"]},
    "error": _NUMBER,
    "tolerance": _NUMBER,
    "microseconds": _NUMBER,
    "sentence": _TEXT,
}
_FINDING = {
    "section": {"type": "string"},
    "level": {"enum": ["error", "warning", "note"]},
    "code": {"type": "string"},
    "message": {"type": "string"},
    "cure": _TEXT,
}


def _record(fields: dict[str, Any], *, others: bool = False) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": others}


def _numbers(*names: str) -> dict[str, Any]:
    return _record({name: {"type": "number"} for name in names}, others=True)


_OP = {
    "op": {"type": "string"},
    "wished": {"type": "string"},
    "used": _TEXT,
    "regimes": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    "trials": {"type": "array", "items": _record(_TRIAL), "minItems": 1},
}
# What docs/doctor.md promises of a healthy CPU.
SCHEMA = _record(
    {
        "format": {"const": 1},
        "multilora": {"type": "string"},
        "device": {"const": "cpu"},
        "verdict": {"enum": ["serves", "serves with fallbacks or warnings", "cannot serve"]},
        "exit_code": {"enum": [0, 1, 2]},
        "sentence": {"type": "string"},
        "findings": {"type": "array", "items": _record(_FINDING)},
        "sections": _record(
            {
                "versions": _record(
                    {
                        **{name: {"type": "string"} for name in ("multilora", "python", "system", "torch")},
                        **dict.fromkeys(("torch_cuda", "torch_npu", "triton", "triton_ascend", "cann"), _TEXT),
                        **dict.fromkeys(("npu_driver", "cuda_driver"), _TEXT),
                    },
                    others=True,
                ),
                "environment": {"type": "object", "additionalProperties": {"type": "string"}},
                "device": _numbers("num_cores", "memory_total_bytes", "memory_free_bytes"),
                "model": _numbers("num_layers", "hidden_size", "weight_bytes", "planned_bytes"),
                "ops": _record(
                    {"shapes": {"type": "object"}, "ops": {"type": "array", "items": _record(_OP), "minItems": 8}}
                ),
                "bandwidth": _numbers("buffer_bytes", "memory_copy"),
                "adapter": _numbers("check_and_store_seconds", "disk_to_host_seconds", "host_to_device_seconds"),
                "store": _record({"directory": {}, "exists": {}, "writable": {"const": True}}, others=True),
            }
        ),
    }
)


class TestOnAHealthyCpu:
    def test_all_that_is_wished_for_serves(self, work_dir: Path) -> None:
        """The report is what the schema says, and gives away neither where nor who."""
        home = work_dir / "home-of-somebody"
        shutil.copytree(BUNDLED, home / "model")
        secret = "swordfish-0815"
        done = visit(
            f"--model-dir={home / 'model'}",
            "--store-dir=adapters",
            work_dir=work_dir,
            HOME=str(home),
            MULTILORA_API_KEYS=secret,
            NVIDIA_REQUIRE_CUDA="x" * 5000,
        )
        assert done.code == 0, done.out
        jsonschema.validate(done.report, SCHEMA)
        assert (done.report["exit_code"], done.report["verdict"]) == (0, "serves")
        assert done.report["sections"]["model"]["directory"] == "~/model"
        environment = done.report["sections"]["environment"]
        assert environment["MULTILORA_API_KEYS"] == "(set)"
        assert environment["NVIDIA_REQUIRE_CUDA"] == f"{'x' * 400}... (5,000 characters)"
        for told in (secret, "home-of-somebody", str(work_dir), f'"{socket.gethostname()}"'):
            assert told not in done.out
        assert not (work_dir / "adapters").exists()
        assert set(done.ops()) == set(IMPLEMENTATIONS["cpu"])
        for op, names in IMPLEMENTATIONS["cpu"].items():
            assert done.ops()[op]["used"] == names[0]
            assert all(
                trial["status"] == "ok" and trial["microseconds"] > 0 and trial["error"] <= trial["tolerance"]
                for trial in done.ops()[op]["trials"]
            )
        assert len(done.ops()["lora"]["trials"]) == 6

    def test_weights_that_are_quantised_while_they_load(self, work_dir: Path) -> None:
        """Their products are tried too."""
        done = visit("--weights=int8", "--store-dir=adapters", work_dir=work_dir)
        assert done.code == 0, done.out
        assert "linear_quantised" in [trial["case"] for trial in done.ops()["linear"]["trials"]]

    def test_it_reads_without_colour(self, work_dir: Path) -> None:
        done = visit("--device=cpu", work_dir=work_dir, as_json=False)
        assert done.code == 0, done.out
        assert "\x1b" not in done.out + done.err
        assert re.search(r"lora_embedding +cpu +ok +\d\.\de[-+]\d\d +1e-04 +\d+", done.out)
        assert done.out.rstrip().rpartition("\n")[2] == (
            "multilora serves on cpu, all of it as wished for, without a warning; no accelerator was looked at, which "
            "takes --device; next: start it with multilora serve and the same settings."
        )


class TestWithFaults:
    def test_each_broken_implementation_is_replaced(self, work_dir: Path) -> None:
        kinds = {"lora": "differs", "paged_attention": "raises", "rms_norm": "kills", "rotary_kv": "missing"}
        done = visit(
            work_dir=work_dir,
            path=BROKEN_OPS,
            BROKEN_OPS=" ".join(f"{op}={kind}" for op, kind in kinds.items()),
            MULTILORA_MIN_FREE_DISK_BYTES="1000PiB",
            PYTORCH_ALLOC_CONF="expandable_segments:True",
            PYTORCH_NPU_ALLOC_CONF="expandable_segments:True",
        )
        assert (done.code, done.report["verdict"]) == (1, "serves with fallbacks or warnings"), done.out
        trials = {op: done.ops()[op]["trials"] for op in kinds}
        # A broken one is tried in each of its regimes.
        wished = {
            op: [trial["status"] for i, trial in enumerate(found) if i == 0 or "broken" not in trial["implementation"]]
            for op, found in trials.items()
        }
        served = {op: IMPLEMENTATIONS["cpu"][op][0] for op in kinds}
        assert {op: done.ops()[op]["used"] for op in kinds} == served
        assert {op: statuses[0] for op, statuses in wished.items()} == {
            "lora": "differs",
            "paged_attention": "raised",
            "rms_norm": "crashed",
            "rotary_kv": "missing",
        }
        assert all(set(statuses[1:]) == {"ok"} for statuses in wished.values())
        fallbacks = [finding["message"] for finding in done.report["findings"] if finding["code"] == "op-fallback"]
        assert len(fallbacks) == len(kinds)
        assert "killed its process with signal 6" in next(one for one in fallbacks if "rms_norm" in one)
        assert "the kernel does not know this size" in next(one for one in fallbacks if "paged_attention" in one)
        assert done.codes()["store-full"] == done.codes()["alloc-conf-twice"] == "warning"
        assert re.fullmatch(
            r"multilora serves on cpu, but not all of it as wished for: 6 warnings \(.*op-fallback.*\), "
            r"with fallbacks for the ops .*lora.*; next: do what the findings above say, or start it .* as it is\.",
            done.report["sentence"],
        )

    def test_an_op_that_nothing_serves_is_the_end(self, work_dir: Path) -> None:
        done = visit(work_dir=work_dir, path=BROKEN_OPS, BROKEN_OPS="swiglu=raises!")
        assert (done.code, done.report["verdict"]) == (2, "cannot serve"), done.out
        assert done.codes()["op-unserved"] == "error"
        assert done.ops()["swiglu"]["used"] is None
        assert done.report["sentence"].startswith("multilora does NOT serve on cpu, because of 1 error (op-unserved)")
        assert done.report["sentence"].endswith("findings above say, and run multilora doctor again.")

    def test_a_broken_model_and_an_unwritable_store(self, work_dir: Path) -> None:
        shutil.copytree(BUNDLED, work_dir / "model")
        (work_dir / "model" / "model.safetensors").write_bytes(b"no tensors")
        (work_dir / "file").write_text("in the way")
        done = visit("--model-dir=model", "--store-dir=file/adapters", work_dir=work_dir)
        assert done.code == 2
        assert done.codes()["model-refused"] == done.codes()["store-unwritable"] == "error"
        assert "skipped" in done.report["sections"]["adapter"]
        assert "(not looked at for that reason: adapter)" in done.report["sentence"]
        # The ops are probed all the same, at sizes of no model.
        assert done.ops()["lora"]["used"] == "cpu"

    def test_weights_that_are_not_those_of_the_config(self, work_dir: Path) -> None:
        shutil.copytree(BUNDLED, work_dir / "model")
        config = json.loads((work_dir / "model" / "config.json").read_text())
        (work_dir / "model" / "config.json").write_text(json.dumps({**config, "intermediate_size": 513}))
        done = visit("--model-dir=model", work_dir=work_dir)
        assert (done.code, done.codes()["model-refused"]) == (2, "error")
        assert "config.json calls for [513, 256]" in done.out

    def test_a_working_directory_that_is_gone(self, work_dir: Path) -> None:
        (work_dir / "gone").mkdir()
        command = f"cd gone && rmdir ../gone && exec {sys.executable} -m service.cli.main doctor --json"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(["sh", "-c", command], cwd=work_dir, env=environment, capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert [finding["code"] for finding in json.loads(done.stdout)["findings"]] == ["settings-fault"]

    def test_a_part_that_breaks_is_a_finding(self) -> None:
        def broken(_examination: Examination) -> Section:
            raise RuntimeError("the driver\nsays no")

        section = look_at(Examination(load_settings(), tell=lambda _: None), "part", "Part", "looking", broken)
        assert [(one.level, one.code, one.message) for one in section.findings] == [
            ("error", "part-fault", "RuntimeError: the driver says no")
        ]

    def test_a_wrong_setting_is_a_sentence(self, work_dir: Path) -> None:
        done = visit("--dtype=int4", work_dir=work_dir)
        assert (done.code, done.codes()) == (2, {"settings": "error"})
        assert "--dtype" in done.report["findings"][0]["message"]


class TestAbsentDevices:
    def test_an_npu_without_its_software(self, work_dir: Path) -> None:
        """With what pip leaves behind when upstream's triton is installed over triton-ascend."""
        for name in ("triton_ascend-3.2.0", "triton-3.7.1"):
            metadata = work_dir / "site" / f"{name}.dist-info" / "METADATA"
            metadata.parent.mkdir(parents=True)
            distribution, _, version = name.replace("_", "-").rpartition("-")
            metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (work_dir / "site" / "triton").mkdir()
        (work_dir / "site" / "triton" / "__init__.py").write_text("")
        done = visit("--device=npu:0", work_dir=work_dir, path=work_dir / "site", ASCEND_HOME_PATH=str(work_dir))
        assert done.code == 2
        errors = {code for code, level in done.codes().items() if level == "error"}
        assert {"torch-npu-missing", "cann-missing", "no-davinci-node", "device-absent"} <= errors
        assert done.codes()["triton-overwritten"] == "warning"
        assert done.report["sections"]["ops"] == {"skipped": "there is no device"}
        assert done.report["sentence"].startswith("multilora does NOT serve on npu:0, because of ")

    def test_a_gpu(self, work_dir: Path) -> None:
        done = visit("--device=cuda", work_dir=work_dir)
        assert done.code == 2
        assert done.codes()["device-absent"] == "error"

    def test_a_torch_npu_that_cannot_be_imported(self, work_dir: Path) -> None:
        """torch loads it by itself, so that the server could not import torch either, whatever its device."""
        site = work_dir / "site"
        (site / "torch_npu-2.13.0.dist-info").mkdir(parents=True)
        (site / "torch_npu.py").write_text('raise ImportError("libhccl.so: cannot open shared object file")')
        (site / "torch_npu-2.13.0.dist-info" / "METADATA").write_text("Name: torch_npu\nVersion: 2.13.0\n")
        entry = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
        (site / "torch_npu-2.13.0.dist-info" / "entry_points.txt").write_text(entry)
        done = visit("--device=cpu", work_dir=work_dir, path=site)
        assert done.code == 2
        findings = {finding["code"]: finding for finding in done.report["findings"]}
        assert "libhccl.so" in findings["torch-npu-broken"]["message"]
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in findings["torch-npu-broken"]["cure"]
        assert findings["probe-failed"]["level"] == "error"
        as_told = visit("--device=cpu", work_dir=work_dir, path=site, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert as_told.code == 0, as_told.out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--resume", "--minutes", "3"), "multilora: --resume, --minutes only means something with --deep.\n"),
        (("--deep", "--json"), "multilora: --deep writes its JSON to report.json of --report-dir; leave --json out.\n"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: tuple[str, ...], sentence: str, work_dir: Path) -> None:
    found = visit(*flags, work_dir=work_dir, as_json=False)
    assert (found.code, found.out, found.err) == (2, "", sentence)
    assert not list(work_dir.iterdir())
