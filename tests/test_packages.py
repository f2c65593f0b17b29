"""The packages themselves: their names, what they import, and that transformers is not confused by `kernels`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parent.parent
SOURCES = ("service", "kernels", "adapters", "tests", "bench", "scripts", "examples")


def _run(code: str, *, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_builds_models_beside_our_kernels_package() -> None:
    """Hugging Face's own package is called `kernels` too, and transformers looks for it by that name."""
    code = """
import kernels, torch, transformers
assert kernels.MULTILORA_KERNELS
sizes = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
             vocab_size=64)
for name in ("Llama", "Lfm2", "Qwen3_5"):
    config_class = getattr(transformers, name + ("TextConfig" if name == "Qwen3_5" else "Config"))
    own = {"layer_types": ["conv", "full_attention"] * 2} if name == "Lfm2" else {}
    model = getattr(transformers, name + "ForCausalLM")(config_class(**sizes, **own))
    print(model(torch.arange(4)[None]).logits.shape[-1])
"""
    assert _run(code).split() == ["64"] * 3


def test_every_package_is_listed_in_pyproject() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("service", "kernels", "adapters")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed == present


def test_importing_the_packages_is_light() -> None:
    """Every `__init__` stays light: importing the packages brings in neither torch nor numpy."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    heavy = "sorted({'torch', 'numpy', 'transformers', 'fastapi', 'pydantic'} & set(sys.modules))"
    assert _run(f"import sys, {', '.join(packages)}; print({heavy})") == "[]"


# Each package may import itself and these.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "kernels": (),
    "adapters": ("kernels",),
    "service/models": ("adapters", "kernels"),
    "service/engine": (
        *("service.models", "service.grammars", "adapters", "kernels"),
        *("service.logs", "service.machine", "service.fairness.fair_cache"),
    ),
    "service/text": ("adapters.isolation", "adapters.text", "adapters.files.paths", "service.fairness"),
    "service/grammars": (
        "service.text.tokenizer",
        # How a tool's values are written, which the parser of a format reads by.
        *("service.text.calls.value_kinds", "service.text.calls.call_parser"),
        *("service.models.spec.config_json", "service.models.families"),
        *("adapters.isolation", "service.fairness"),
    ),
    "service/cluster": ("service.engine", "service.start_check"),
    # Of the engine, what it takes for a weight.
    "service/tenants": ("service.engine.ipc.messages", "service.logs", "adapters.files.durable_files"),
    "service/api": (
        *("service.engine", "service.models", "service.tenants", "service.text", "service.grammars"),
        *("adapters", "kernels"),
        *("service.settings", "service.logs", "service.server_version", "service.fairness"),
    ),
    # A client of a server that runs elsewhere.
    "service/client.py": ("service.cli.adapter_files", "service.cli.client", "service.cli.upload_client"),
    "service/cli/adapter_files.py": ("service.cli.client",),
    "service/cli/client.py": ("service.server_version",),
    "service/cli/chat.py": ("service.cli.client",),
    "service/cli/commands.py": ("service.cli.adapter_files", "service.cli.client", "service.cli.upload_client"),
    "service/cli/upload_client.py": ("service.cli.client", "service.server_version"),
    "service/cli/load_test.py": ("service.cli.client",),
    "service/fairness": (),
    "service/logs.py": (),
    "service/machine.py": (),
    "service/settings.py": ("service.engine.ipc.config", "service.setting_types", "service.machine"),
    "service/setting_types.py": (),
    # Runs engines; knows nothing of HTTP.
    "service/doctor": (
        *("service.engine", "service.models", "adapters", "kernels"),
        *("service.settings", "service.machine", "service.start_check", "service.server_version"),
    ),
}

# Inside a package: each folder and file, and those beside it that it may import. Each names only those above it, so
# there is no circle.
LAYERS: dict[str, dict[str, str]] = {
    "kernels": {
        "arrays": "",
        "ascend_chips": "",
        "child_process": "",
        "triton_launch": "",
        "attention_maps": "arrays",
        "shapes": "",
        "contract": "attention_maps shapes",
        "platform": "ascend_chips contract",
        "batch_invariant": "platform shapes triton_launch",
        "ascend_runtime": "platform",
        "compile_ahead": "child_process platform",
        "linear": "batch_invariant contract platform triton_launch",
        "paged_attention": "attention_maps contract platform shapes triton_launch",
        "rms_norm": "contract platform triton_launch",
        "row_scatter": "contract platform triton_launch",
        "sampling": "arrays batch_invariant contract platform triton_launch",
        "swiglu": "contract platform shapes triton_launch",
        "ascend_relaunch": "ascend_runtime",
        "causal_conv1d": "ascend_runtime attention_maps contract platform triton_launch",
        "gated_delta": "ascend_relaunch causal_conv1d contract platform shapes triton_launch",
        "mamba2": "contract gated_delta platform",
        "lora": "arrays ascend_relaunch ascend_runtime contract platform triton_launch",
        "expert_lora": "ascend_relaunch contract lora platform triton_launch",
        "experts": "batch_invariant contract expert_lora linear lora platform shapes swiglu triton_launch",
        "rotary_kv": "ascend_relaunch contract paged_attention platform shapes triton_launch",
        "lora_window": "ascend_relaunch contract lora platform triton_launch",
        "probe": "ascend_runtime attention_maps causal_conv1d child_process compile_ahead expert_lora experts "
        "gated_delta linear lora lora_window mamba2 paged_attention platform rms_norm rotary_kv row_scatter sampling "
        "shapes swiglu",
    },
    "adapters": {
        "errors": "",
        "isolation": "",
        "layout": "",
        "quota": "",
        "files": "errors layout quota",
        "row_plan": "layout",
        "sums": "files row_plan",
        "text": "errors files",
        "peft": "errors files isolation layout text",
        "memory": "errors files layout peft row_plan sums",
        "upload": "errors files layout peft quota row_plan text",
        "store": "errors files layout row_plan text upload",
    },
    "service/models": {
        "heap": "",
        "step_batch": "",
        "spec": "",
        "gguf_file": "spec",
        "checkpoint": "gguf_file spec",
        "families": "gguf_file spec",
        "gguf_directory": "families gguf_file spec",
        "layers": "checkpoint spec step_batch",
        "layouts": "families gguf_file spec",
        "loader": "checkpoint families heap layers layouts spec",
        "merging": "checkpoint families layouts spec",
    },
    "service/engine": {
        "ipc": "",
        "transient_thread": "",
        "model": "ipc",
        "sequences": "ipc",
        "grammar": "ipc model sequences transient_thread",
        "step_records": "ipc sequences",
        "loras": "ipc step_records",
        "scheduling": "loras sequences",
        "requests": "grammar ipc loras model scheduling sequences",
        "pauses": "ipc requests scheduling",
        "step": "ipc loras model scheduling sequences",
        "sleeping": "ipc loras model pauses requests scheduling step",
        "engine": "grammar ipc loras model pauses requests scheduling sequences sleeping step step_records",
        "startup": "engine ipc loras model scheduling step transient_thread",
        "process": "engine ipc startup",
    },
    "service/api": {
        "engine_protocol": "",
        "errors": "",
        "http_rules": "",
        "metrics": "http_rules",
        "page": "",
        "page_cache": "",
        "queue_limits": "errors",
        "response_store": "",
        "schema": "errors",
        "http": "errors http_rules schema",
        "uploads": "errors http schema",
        "state": "engine_protocol errors metrics page_cache queue_limits response_store schema uploads",
        "access": "errors http_rules page state",
        "admission": "access errors http metrics queue_limits schema state",
        "openapi": "access schema",
        "generation": "admission errors http metrics queue_limits schema state",
        "entry": "access errors generation http http_rules metrics schema",
        "adapter_routes": "access admission entry errors openapi page_cache schema state uploads",
        "routes": "access adapter_routes admission entry errors generation http openapi response_store schema state",
    },
    # The stages of a request, in order.
    "service/api/admission": {
        "model_resolution": "",
        "rendering": "model_resolution",
        "prompts": "rendering",
        "answer_constraints": "rendering",
        "plans": "answer_constraints model_resolution prompts",
        "pooled": "model_resolution plans prompts rendering",
        "pipeline": "answer_constraints model_resolution plans pooled prompts rendering",
    },
}


@cache
def _imported(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and full name of everything that a file imports, wherever in it."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively, which is not understood here"
            found += ((node.lineno, f"{node.module}.{name.name}") for name in node.names)
    return tuple(found)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part: str) -> None:
    """api -> engine -> models -> kernels; adapters knows the kernels' weight layout and nothing of the service."""
    here = ROOT / part
    allowed = (part.removesuffix(".py").replace("/", "."), *MAY_IMPORT[part])
    files = [here] if here.is_file() else sorted(here.rglob("*.py"))
    assert files
    wrong = [
        f"{path}:{line} imports {name}"
        for path in files
        for line, name in _imported(path)
        if name.split(".")[0] in ("service", "adapters", "kernels")
        and not any(f"{name}.".startswith(f"{one}.") for one in allowed)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_through_others() -> None:
    """Also none that is imported for its types alone: in a circle there is no file that can be read first."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for top in ("service", "kernels", "adapters")
        for path in (ROOT / top).rglob("*.py")
    }

    def file_of(name: str) -> str:
        return name if name in files else name.rpartition(".")[0]

    imported = {name: {file_of(one) for _, one in _imported(path)} & files.keys() for name, path in files.items()}
    TopologicalSorter({name: found - {name} for name, found in imported.items()}).prepare()


def _part(name: str, package: str) -> str | None:
    """The folder or file of the package that a dotted name lies in; None outside of it and for the package itself."""
    dotted = package.replace("/", ".") + "."
    return name.removeprefix(dotted).split(".")[0] if name.startswith(dotted) else None


@pytest.mark.parametrize("package", LAYERS)
def test_layers_of_a_package_import_only_what_lies_below(package: str) -> None:
    layers = LAYERS[package]
    for number, (part, below) in enumerate(layers.items()):
        assert set(below.split()) <= set(list(layers)[:number]), f"{package}/{part} names what does not stand above it"
    parts = {path.stem if path.is_file() else path.name for path in (ROOT / package).iterdir()}
    present = {part for part in parts if _files(package, part)}
    assert set(layers) == present, "a folder or file is missing in LAYERS, or is gone"
    wrong = [
        f"{path}:{line} imports {name}"
        for part, below in layers.items()
        for path in _files(package, part)
        for line, name in _imported(path)
        if (imported := _part(name, package)) in layers and imported not in (part, *below.split())
    ]
    assert not wrong, "\n".join(wrong)


def _files(package: str, part: str) -> list[Path]:
    """The Python files of one folder or file of a package."""
    if part == "__init__":
        return []
    here = ROOT / package / part
    return (
        sorted(here.rglob("*.py")) if here.is_dir() else [here.with_suffix(".py")] * here.with_suffix(".py").is_file()
    )


MAX_FILES_OF_A_FOLDER = 16


def test_no_folder_is_crowded() -> None:
    """A stranger finds a file by the names of folders and of at most sixteen files."""
    counts = Counter(path.parent for top in SOURCES for path in (ROOT / top).rglob("*.py"))
    crowded = {
        str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MAX_FILES_OF_A_FOLDER
    }
    assert not crowded, crowded


MAX_LINES_OF_A_FILE = 430
# Kernels of one op that share their loops and helpers; each file says why it is long.
LONG_KERNELS = {
    "kernels/batch_invariant/cuda.py",
    "kernels/causal_conv1d/triton_ascend.py",
    "kernels/causal_conv1d/triton_cuda.py",
    "kernels/paged_attention/triton_cuda_kernels.py",
}


def test_no_file_of_the_product_is_long() -> None:
    """Some 300 lines are read in one sitting; a longer file has a second subject, which belongs elsewhere."""
    files = {path for top in ("service", "kernels", "adapters") for path in (ROOT / top).rglob("*.py")}
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files}
    long = {name: length for name, length in lengths.items() if length > MAX_LINES_OF_A_FILE}
    assert long.keys() == LONG_KERNELS, long
    assert all("file is long because" in (ROOT / name).read_text() for name in LONG_KERNELS)


def test_bench_and_tests_share_tests_support_alone() -> None:
    """Neither needs the other, and no module of the wheel needs either."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for top, banned in {
            **dict.fromkeys(("service", "kernels", "adapters"), ("tests", "bench")),
            **dict.fromkeys(("tests", "examples", "scripts"), ("bench",)),
            "bench": ("tests",),
        }.items()
        for path in (ROOT / top).rglob("*.py")
        for line, name in _imported(path)
        if name.split(".")[0] in banned and not (top == "bench" and name.startswith("tests.support."))
    ]
    assert not wrong, "\n".join(wrong)


def test_clients_name_the_files_that_the_server_reads() -> None:
    """They import nothing of the store, which takes 0.1 s, and say the names again."""
    code = """
from adapters.files.paths import CONFIG_FILE, TENSOR_FILE
from adapters.files.safetensors_header import INDEX_NAME
from adapters.text.side_files import TEMPLATES_FOLDER, role_of
from service.cli import adapter_files
assert (adapter_files.CONFIG, adapter_files.TENSORS) == (CONFIG_FILE, TENSOR_FILE)
assert (adapter_files._INDEX, adapter_files._TEMPLATES) == (INDEX_NAME, TEMPLATES_FOLDER)
assert "ignored" not in map(role_of, adapter_files._BESIDE)
"""
    _run(code)


def test_ray_is_imported_by_its_own_modules_alone() -> None:
    """It is an extra: whoever does not ask for it need not have it."""
    files = [path for top in ("service", "kernels", "adapters") for path in (ROOT / top).rglob("*.py")]
    names = {path: {name for _, name in _imported(path)} for path in files}
    importing = {
        path.relative_to(ROOT).as_posix() for path in files if any(one.split(".")[0] == "ray" for one in names[path])
    }
    assert importing == {"service/ray_serve/app.py", "service/ray_serve/replicas.py"}
    outside = [path for path in files if "ray_serve" not in path.parts]
    assert not [path for path in outside if any(one.startswith("service.ray_serve") for one in names[path])]


def test_modules_that_texts_name_are_there() -> None:
    """A docstring, a comment or a page that names a module in backticks names one that has not moved since."""
    modules = [path.relative_to(ROOT).as_posix() for top in SOURCES for path in (ROOT / top).rglob("*.py")]
    texts = [path for top in ("service", "kernels", "adapters") for path in (ROOT / top).rglob("*.py")]
    texts += [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text())
        if not any(f"/{module}".endswith(f"/{name}") for module in modules)
    }
    assert not missing, missing


PLAIN_DOCSTRINGS = ("adapters", "kernels", "service")
_NO_SUBJECT = re.compile(r"(What|Of|Whose|That|Who)\b")


@pytest.mark.parametrize("package", PLAIN_DOCSTRINGS)
def test_docstrings_begin_with_their_subject(package: str) -> None:
    """A docstring that opens with "What" or "Of" must be read twice."""
    unclear = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (docstring := ast.get_docstring(node))
        and _NO_SUBJECT.match(docstring)
    ]
    assert not unclear, unclear


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a page outside of tables and blocks of code."""
    in_block = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_block = not in_block
        elif not in_block and not line.lstrip().startswith("|"):
            yield number, line


PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
]


def test_pages_are_short() -> None:
    long = [f"{page.name}:{number}" for page in PAGES for number, line in _prose(page) if len(line) > 120]
    assert not long, long
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md")) <= 34_000


def _anchors(page: Path) -> set[str]:
    """Those of a page's headings, as GitHub makes them."""
    headings = (line.lstrip("#").strip().lower() for _, line in _prose(page) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def test_links_between_pages_resolve() -> None:
    broken = []
    for page in (*PAGES, *(ROOT / "bench" / "records").glob("*.md")):
        # `code` may have brackets of its own.
        text = re.sub(r"`[^`]*`", "", page.read_text())
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http:", "https:")):
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, broken
