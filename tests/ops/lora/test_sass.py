"""What tests/support/ops/sass.py finds in machine code, of instructions as ptxas of CUDA 12.8 wrote them."""

from __future__ import annotations

from tests.support.ops.sass import foreign_descriptors

HEADER = """
        /*0b40*/                   USHF.R.U32.HI UR16, URZ, 0x4, UR16 ;
        /*0b50*/                   USGXT.U32 UR30, UR16, 0xe ;
        /*0b60*/                   ULOP3.LUT UR12, UR12, 0x3fff, URZ, 0xc0, !UPT ;
        /*0cf0*/                   UIADD3 UR22, UP1, UR30, 0x80, URZ ;
        /*1140*/                   UIADD3.64 UR44, UR12, 0x202, URZ ;
"""
PRODUCT = "        /*6400*/                   HGMMA.64x64x16.F32.BF16 R24, R104, gdesc[{}].tnspB, R24, gsb0 ;\n"


def test_addresses_that_were_cut_out_are_right() -> None:
    assert foreign_descriptors(HEADER + PRODUCT.format("UR20") + PRODUCT.format("UR28")) == []


def test_both_descriptors_count_where_both_operands_are_in_shared_memory() -> None:
    both = "        /*8ee0*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[{}].tnspB, R24 ;\n"
    assert foreign_descriptors(HEADER + both.format("UR28")) == [
        "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR28].tnspB, R24"  # UR28 was never written, UR30 was
    ]
    assert foreign_descriptors(HEADER + "        /*0d00*/    UMOV UR28, UR12 ;\n" + both.format("UR28")) == []


def test_the_result_of_other_arithmetic_is_found() -> None:
    """The fault that was seen: the second descriptor of a chain is a quotient plus a constant."""
    quotient = "        /*10990*/                   ULEA.HI UR22, UR28, UR8, URZ, 0x6 ;\n"
    found = foreign_descriptors(HEADER + quotient + PRODUCT.format("UR20") + PRODUCT.format("UR28"))
    assert found == ["HGMMA.64x64x16.F32.BF16 R24, R104, gdesc[UR20].tnspB, R24, gsb0"]


def test_descriptors_that_were_saved_meanwhile_are_right() -> None:
    saved = """
        /*1370*/                   MOV R10, UR44 ;
        /*1380*/                   STL.64 [R1+0x10], R10 ;
        /*1715*/                   UIADD3 UR46, UR5, 0x3f, URZ ;
        /*4830*/                   LDL.64 R106, [R1+0x10] ;
        /*4c90*/                   R2UR UR46, R{} ;
"""
    assert foreign_descriptors(HEADER + saved.format(106) + PRODUCT.format("UR44")) == []
    assert len(foreign_descriptors(HEADER + saved.format(107) + PRODUCT.format("UR44"))) == 1
