"""The wheel by itself: built, installed away from the tree, and serving the bundled model that lies in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.http.server import running_server
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("service", "kernels", "adapters")


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy, since setuptools leaves files beside what it builds; without the network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    _run(*pip, "--wheel-dir", source / "dist", source, cwd=source)
    (built,) = (source / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `multilora` of an environment that has the wheel, and what it depends on from the tests' own."""
    home = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    _run(*pip, wheel, cwd=home)
    (own,) = home.glob("lib/python*/site-packages")
    # Plain lines: they stand behind what is installed, and no .pth of theirs, such as that of this tree, is read.
    (own / "tests.pth").write_text("".join(f"{path}\n" for path in sys.path if Path(path).name == "site-packages"))
    found = _run(python, "-c", "import service, kernels, adapters; print(service.__file__)", cwd=home)
    assert Path(found.strip()).parents[1] == own
    return home / "bin" / "multilora"


def test_everything_in_the_packages_is_in_the_wheel(wheel: Path) -> None:
    here = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == here


def test_it_serves_the_bundled_model_and_adapters(installed: Path, tmp_path: Path) -> None:
    with running_server(None, tmp_path, installed=installed) as server:
        said = [{"role": "user", "content": "lamp tiger moss"}]
        body = {"model": "shout", "messages": said, "temperature": 0, "max_tokens": 80}
        answer = server.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == "LAMP TIGER MOSS!"
        assert server.get("/version").json()["version"] == version("multilora")
        assert "<html" in server.get("/").text
        listed = _run(installed, "ls", "--url", server.url, cwd=tmp_path)
        assert all(name in listed for name in ("shout", "reverse", "json", "pig-latin"))


def test_it_tells_of_itself(installed: Path, tmp_path: Path) -> None:
    assert _run(installed, "--version", cwd=tmp_path) == f"multilora {version('multilora')}\n"
    assert "--kv-bytes" in _run(installed, "help", "memory", cwd=tmp_path)
    for shell in ("bash", "zsh"):
        assert "--kv-bytes" in _run(installed, "completion", shell, cwd=tmp_path)
