"""The packages themselves: their names, what they import, and that transformers is not confused by `kernels`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parent.parent
SOURCES = ("service", "kernels", "adapters", "tests", "bench", "scripts", "examples")


def _run(code: str, *, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("model", ["Llama", "Lfm2", "Qwen3_5"])
def test_transformers_builds_models_beside_our_kernels_package(model: str) -> None:
    """Hugging Face's own package is called `kernels` too, and transformers looks for it by that name."""
    code = f"""
import kernels, torch, transformers
assert kernels.MULTILORA_KERNELS
name = {model!r}
config_class = getattr(transformers, name + ("TextConfig" if name == "Qwen3_5" else "Config"))
sizes = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
             vocab_size=64)
if name == "Lfm2":
    sizes["layer_types"] = ["conv", "full_attention"] * 2
model = getattr(transformers, name + "ForCausalLM")(config_class(**sizes))
print(model(torch.arange(4)[None]).logits.shape[-1])
"""
    assert _run(code) == "64"


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


# What of this repository each part may import beside itself.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "kernels": (),
    "adapters": ("kernels",),
    "service/models": ("adapters", "kernels"),
    "service/engine": (
        *("service.models", "service.grammars", "adapters", "kernels"),
        *("service.logs", "service.child_process", "service.machine", "service.fair_cache"),
    ),
    "service/text": (
        *("service.bounded_child", "service.fair_pool", "service.payer"),
        # Which templates and special tokens a directory has is read alike of a base's and of an adapter's.
        *("adapters.extras", "adapters.paths", "adapters.tokenizer_files", "adapters.vocabulary"),
    ),
    "service/grammars": (
        "service.text.tokenizer",
        # How a tool's values are written, which the parser of a format reads by.
        "service.text.calls.value_kinds",
        "service.models.config_json",
        "service.models.families",
        "service.bounded_child",
        "service.fair_pool",
        "service.fair_cache",
        "service.payer",
    ),
    # Of the store, what tells whether its directory can be written.
    "service/cluster": ("service.engine", "service.start_check", "adapters.written"),
    # Of the engine, what it takes for a weight.
    "service/tenants": ("service.engine.messages", "service.logs"),
    "service/api": (
        *("service.engine", "service.models", "service.tenants", "service.text", "service.grammars"),
        *("adapters", "kernels"),
        *("service.settings", "service.logs", "service.version", "service.payer", "service.fair_pool"),
    ),
    # A client of a server that runs elsewhere.
    "service/command_client.py": ("service.version",),
    "service/chat_command.py": ("service.command_client",),
    "service/commands.py": ("service.command_client", "service.upload_client"),
    "service/load_test.py": ("service.command_client",),
    # What everybody may import knows nobody.
    "service/logs.py": (),
    "service/child_process.py": (),
    "service/bounded_child.py": ("service.child_process", "adapters.confinement"),
    "service/fair_pool.py": (),
    "service/fair_cache.py": (),
    "service/payer.py": (),
    "service/machine.py": (),
    "service/version.py": (),
    # Of the machine, how many connections it bears.
    "service/settings.py": ("service.engine.config", "service.setting_types", "service.machine"),
    "service/setting_types.py": (),
    # Looks at a host as the doctor does, and runs engines; knows nothing of HTTP.
    "service/first_host": (
        *("service.engine", "service.models", "service.doctor", "adapters", "kernels"),
        *("service.settings", "service.machine", "service.child_process", "service.version"),
    ),
}


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively, which is not understood here"
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


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


def test_ray_is_imported_by_its_own_modules_alone() -> None:
    """It is an extra: whoever does not ask for it need not have it."""
    files = [path for top in ("service", "kernels", "adapters") for path in (ROOT / top).rglob("*.py")]
    names = {path: {name for _, name in _imported(path)} for path in files}
    importing = {path.name for path in files if any(one.split(".")[0] == "ray" for one in names[path])}
    assert importing == {"ray_app.py", "ray_replicas.py"}
    theirs = {path.name for path in files if any(one.startswith("service.ray_") for one in names[path])}
    assert theirs == {"ray_app.py"}


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
