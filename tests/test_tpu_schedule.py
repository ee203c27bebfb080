"""Schedules as different versions of libtpu write them."""

import pytest

from benchmarks.tpu.schedule import read_schedules

REST = "XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"
BUNDLES = """
     0   :  { %s1 = custom-call }
   0x1 LB: > { %s2 = nop }
   0x2   : > { %s3 = nop }
   0x3 LE:  { %s4 = nop }
"""


def write(folder, units, capacity, products):
    """Four bundles, the middle two a loop that multiplies."""
    (folder / "17-kernel.1-02-original.txt").write_text("space=smem, size = 0x10")
    (folder / "17-kernel.1-76-final_bundles.txt").write_text(BUNDLES)
    rest = " 0" * 8 + " 1"
    rows = [f"{'0 ' * products}".strip() + rest, "1" + " 0" * (products - 1) + rest] * 2
    text = "\n".join(["== CAPACTIY:", units, capacity, "== UTILIZATION:", rows[0], rows[1], rows[1], rows[0]])
    (folder / "17-kernel.1-74-final_hlo-static-per-bundle-utilization.txt").write_text(text)


@pytest.mark.parametrize(
    ("units", "capacity", "products"),
    [(f"MXU, {REST}", "2 2 4 2 1 3 3 2 2 2", 1), (f"MATMUL, MATPUSH, {REST}", "2 2 2 4 2 1 3 3 2 2 2", 2)],
)
def test_units_are_read_by_name(tmp_path, units, capacity, products):
    write(tmp_path, units, capacity, products)
    schedule = read_schedules(tmp_path)["kernel"]
    (block,) = schedule.multiplying
    assert (block.first, block.last, block.depth, block.slots["MXU"], block.slots["SALU"]) == (1, 3, 1, 2, 2)
    assert (schedule.capacity["MXU"], schedule.capacity["VALU"], schedule.smem_bytes) == (2, 4, 16)


def test_an_unknown_libtpu_is_told_by_name(tmp_path):
    write(tmp_path, f"TENSOR, {REST}", "2 2 4 2 1 3 3 2 2 2", 1)
    with pytest.raises(ValueError, match=r"units TENSOR, XLU.*install one of libtpu 0\.0\.42 to 0\.0\.50, libtpu 0\.0\.52"):
        read_schedules(tmp_path)
