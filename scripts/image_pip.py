"""Write this machine's settings of pip into one file, and print the local paths they name, one per line.

python scripts/image_pip.py TARGET_FILE
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

# Settings that only make sense outside the build.
_NOT_CARRIED = {"cache-dir", "target", "user", "prefix", "root", "log", "require-virtualenv"}


def settings() -> dict[str, str]:
    """Name and value of each setting; an environment variable goes before a file."""
    printed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, str] = {}
    for line in sorted(printed.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", "install", ":env:") and name not in _NOT_CARRIED:
            found[name] = str(ast.literal_eval(value))
    return found


def local_paths(found: dict[str, str]) -> set[Path]:
    """What exists here and is named by a setting: certificates, folders of wheels, and an index in files with the
    folder it lies in, since its links usually lead out of it."""
    paths = set()
    for name, value in found.items():
        for word in value.split():
            path = Path(urlsplit(word).path if word.startswith("file:") else word)
            if path.is_absolute() and path.exists():
                paths.add(path.parent if name.endswith("index-url") else path)
    return paths


def main(target: Path) -> None:
    """Write the file, readable by its owner alone: an index's address may hold a password."""
    found = settings()
    target.touch(mode=0o600)
    target.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(found.items())))
    for path in sorted(local_paths(found)):
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
