"""Make triton-ascend 3.2.0 build on CANN 9 and later.

Its npu_utils.cpp, which is compiled at the first use of a kernel, names stack limits of SIMT cores that CANN 9 has
renamed, in a table of limits that can be set. multilora sets no such limit and no chip that 3.2.0 serves has SIMT
cores, so their entries are removed. The file is found without importing Triton. Exit code 1, with a sentence, if the
file is not what this was written for.
"""

import importlib.util
import re
import sys
from pathlib import Path

TABLE = re.compile(r"(LimitTypeMap\s*=\s*\{)(.*?)(\n\s*\};)", re.DOTALL)
ENTRY = re.compile(r"\n[ \t]*\{\"\w+\",\s*rtLimitType_t::RT_LIMIT_TYPE_SIMT_\w+\},?(?=\s)")


def without_simt_limits(source: str) -> str:
    """The C++ source without the SIMT entries of its table. ValueError if there is no table, no or another entry."""
    tables = TABLE.findall(source)
    if len(tables) != 1:
        raise ValueError(f"expected one LimitTypeMap, found {len(tables)}")
    patched = TABLE.sub(lambda match: match[1] + ENTRY.sub("", match[2]) + match[3], source)
    if patched == source:
        raise ValueError("LimitTypeMap has no entry for SIMT cores")
    if "RT_LIMIT_TYPE_SIMT" in patched:
        raise ValueError("a SIMT limit is named in a form this patch does not know")
    return patched


def main() -> None:
    """Patch the installed Triton in place; a file that is patched already stays as it is."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        sys.exit("patch_triton_ascend: triton-ascend is not installed")
    path = Path(spec.origin).parent / "backends" / "ascend" / "npu_utils.cpp"
    if not path.is_file():
        sys.exit(f"patch_triton_ascend: {path} does not exist; upstream's Triton is installed in triton-ascend's place")
    source = path.read_text()
    if "RT_LIMIT_TYPE_SIMT" in source:
        try:
            path.write_text(without_simt_limits(source))
        except ValueError as error:
            sys.exit(f"patch_triton_ascend: {path}: {error}")
    print(f"patch_triton_ascend: {path} names no SIMT limit")


if __name__ == "__main__":
    main()
