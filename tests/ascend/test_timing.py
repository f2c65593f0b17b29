"""The gate's estimate of time, against values computed by hand from the tables of msopmodeling 1.0.9."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.ascend.cases import bad_kernels
from tests.ascend.gate import checks, timing
from tests.ascend.gate.cases import REQUIRED_TARGETS
from tests.ascend.gate.memory import MemRef, Storage, contiguous_strides
from tests.ascend.gate.simulator import Counts

# GB/s in bandwidth_910B4.csv, from global memory to the unified buffer of one core, of two and of 40, and back.
LOAD_1, LOAD_2, LOAD_40 = 64.36268213, 41.14363724, 26.51021693
STORE_1, STORE_40 = 131.3491311, 29.66315149
BYTES_PER_US = 1073.741824  # 2^30 bytes in a second


def vector(*sizes: int, kind: str = "f32") -> MemRef:
    return MemRef(Storage.__new__(Storage), 0, kind, 0, [*sizes], contiguous_strides([*sizes]), "ub")


@pytest.mark.parametrize(
    ("action", "num_bytes", "moved_bytes", "effort"),
    [
        ("load", 1024, 1024, 6190),  # 1024 / (0.0001533 x 1024 + 0.0084369) = 1024 / 0.1654161
        ("load", 4096, 4096, 6437),  # 4096 / 0.6363537
        ("load", 8192, 8192, 8192),  # the line has reached 1, at 6,468 bytes
        ("load", 32, 128, 9593),  # a piece of 128 bytes holds the row of 32: 128 / 0.0133425
        ("store", 1024, 1024, 12543),  # 1024 / (0.0000737 x 1024 + 0.0061727) = 1024 / 0.0816415
        ("store", 8192, 8192, 13431),  # 8192 / 0.6099231
        ("store", 16384, 16384, 16384),
    ],
)
def test_a_short_transfer_takes_longer_than_its_bytes(
    action: str, num_bytes: int, moved_bytes: int, effort: int
) -> None:
    assert timing.transfer_effort(action, num_bytes, moved_bytes) == effort


@pytest.mark.parametrize(
    ("function", "operands", "cycles"),
    [
        ("vmul_2d_f32", [vector(512), vector(512), vector(512)], 13 + 19 + 2 * 8),  # 8 repeats of 256 bytes
        ("vexp_1d_f32", [vector(500)], 13 + 24 + 2 * 8),  # the last repeat is a whole one
        ("vadd_2d_f32", [vector(4, 64), vector(64)], 13 + 18 + 2 * 4),  # as its largest operand
        ("vcast_bf16_to_f32", [vector(64, kind="bf16"), vector(64)], 14 + 18 + 2),
        ("reduce_sum_r_f32", [vector(1024), vector(1)], 14 + 32 + 7 * 16),  # VCADD
        ("broadcast_2d_f32", [vector(128)], 11 + 13 + 2),  # VECTOR_DUP
        ("vunheard_f32", [vector(64)], 13 + 18 + 2),  # as VADD
        ("vmul_2d_f32", [vector(0)], 0),
        ("copy_ubuf_to_ubuf_2d_f32", [vector(512), vector(512)], 11 + 13 + 1 * 8),  # VCOPY
        ("load_gm_to_ubuf_2d_f32", [vector(64)], 0),
    ],
)
def test_cycles_of_the_vector_unit(function: str, operands: list[MemRef], cycles: int) -> None:
    assert timing.vector_cycles(function, operands) == cycles


def test_cycles_of_the_cube_unit() -> None:
    """Steps of 16 x 16 outputs and 32 bytes of the summed dimension; two cycles each in float32."""
    assert timing.cube_cycles(16, 64, 32, 2) == 1 * 2 * 4
    assert timing.cube_cycles(17, 64, 32, 2) == 2 * 2 * 4
    assert timing.cube_cycles(16, 64, 32, 4) == 1 * 2 * 8 * 2


def cores(number: int, kind: str = "AIV", **counts: int) -> Counts:
    both = {"load_bytes": counts.get("load_effort", 0), "store_bytes": counts.get("store_effort", 0)}
    return Counts({(block, kind, 0): Counter(both | counts) for block in range(number)})


def test_a_core_takes_as_long_as_its_slowest_unit() -> None:
    """All cores share the memory's bandwidth; 1,650 cycles are a microsecond."""
    busy = {"load_effort": 100_000, "store_effort": 100_000}
    assert cores(1, **busy).estimate_us() == pytest.approx(100_000 / (LOAD_1 * BYTES_PER_US))
    assert cores(40, **busy).estimate_us() == pytest.approx(100_000 / (LOAD_40 * BYTES_PER_US))
    assert cores(1, store_effort=100_000).estimate_us() == pytest.approx(100_000 / (STORE_1 * BYTES_PER_US))
    assert cores(40, store_effort=100_000).estimate_us() == pytest.approx(100_000 / (STORE_40 * BYTES_PER_US))
    assert cores(40, **busy, vector_cycles=33_000).estimate_us() == pytest.approx(20)
    assert cores(1, "AIC", load_bytes=100_000).estimate_us() == pytest.approx(100_000 / (82.45158767 * BYTES_PER_US))
    assert cores(1, "AIC", store_bytes=100_000).estimate_us() == pytest.approx(100_000 / (46.66418036 * BYTES_PER_US))
    assert cores(1, "AIC", load_bytes=1, cube_cycles=1650, vector_cycles=1650).estimate_us() == pytest.approx(2)


def test_the_slowest_core_counts_and_idle_ones_share_nothing() -> None:
    found = Counts(
        {(0, "AIV", 0): Counter(load_bytes=1, load_effort=60_000), (1, "AIV", 0): Counter(vector_cycles=165)}
    )
    assert found.estimate_us() == pytest.approx(60_000 / (LOAD_1 * BYTES_PER_US))


def test_more_cores_than_the_table_knows_are_as_its_last() -> None:
    """Loads are known of 40 cores, stores of 48."""
    assert cores(48, load_effort=100_000).estimate_us() == pytest.approx(100_000 / (LOAD_40 * BYTES_PER_US))


def test_a_launch_takes_the_time_of_its_rows() -> None:
    """Two cores copy four rows of 1 KB each, one by one."""
    case, launch = bad_kernels.GOOD, bad_kernels.GOOD.launches["launch"]()
    counts = checks.run_simulated(case, launch, checks.compile_launch(case, launch, REQUIRED_TARGETS[0]))
    assert counts.total("short_transfers") == 16
    assert counts.estimate_us() == pytest.approx(4 * 6190 / (LOAD_2 * BYTES_PER_US))
