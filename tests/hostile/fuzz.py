"""One target that takes bytes, with inputs that atheris finds by the code that they reach. Run by `tests.hostile`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import atheris

# Instrumented where strangers' bytes are read, by us and by those we hand them to.
_READERS = ["adapters", "service.api", "service.text", "h11", "python_multipart", "tarfile", "zipfile", "gzip"]


def main() -> None:
    """Ends this process: 0 when all was well."""
    for name in ("tarfile", "zipfile", "gzip"):
        sys.modules.pop(name, None)
    with atheris.instrument_imports(include=_READERS):
        from tests.hostile.targets import Targets, writes_outside
    from tests.hostile.__main__ import resident_bytes

    sys.dont_write_bytecode = True
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    targets = Targets(root / "targets")
    target = targets.all()[sys.argv.pop(1)]
    corpus = root / "corpus"
    corpus.mkdir()
    for index, seed in enumerate(target.seeds):
        (corpus / str(index)).write_bytes(seed)
    num_runs = next(int(flag.partition("=")[2]) for flag in sys.argv if flag.startswith("-runs="))
    count, held = 0, list[int]()
    hook, written = writes_outside(root)

    def one(data: bytes) -> None:
        nonlocal count
        count += 1
        if count == 100:
            sys.addaudithook(hook)
        target.check(data)
        assert not written, f"written outside the stores: {written[:5]}"
        if count % (num_runs // 20) == 0:  # nothing runs when atheris has ended this process
            held.append(resident_bytes())
            print(f"grew by {held[-1] - held[len(held) // 2]} bytes", flush=True)

    atheris.Setup([*sys.argv, str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
