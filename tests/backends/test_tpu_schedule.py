"""Schedules of several versions of libtpu are read alike; one in another form is refused by name."""

import pytest

from benchmarks.tpu import schedule

REST = "XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"
OLD = "MXU, " + REST, "    2     2     4     2     1     3     3     2     2     2", "", [1, 2, 0]
NEW = "MATMUL, MATPUSH, " + REST, "    2     2     2     4     2     1     3     3     2     2     2", "1 ", [1, 2, 0]


def dump(folder, header, capacity, pushes, multiplications):
    stem = "17-chunk_attention.1"
    rows = [f"{count} {pushes}0 0 0 0 0 0 0 0 1" for count in multiplications]
    usage = "\n".join(["== CAPACTIY:", header, capacity, "== UTILIZATION:", *rows])
    (folder / f"{stem}-74-final_hlo-static-per-bundle-utilization.txt").write_text(usage)
    bundles = "custom-call\n     0   :  { }\n   0x1 LB: > { }\n   0x2   : > { }\n"
    (folder / f"{stem}-76-final_bundles.txt").write_text(bundles)
    (folder / f"{stem}-02-original.txt").write_text("space=smem, size = 0x200")


@pytest.mark.parametrize("libtpu", [OLD, NEW], ids=["0.0.42 to 0.0.50", "0.0.52"])
def test_multiplications_are_counted_under_both_names(tmp_path, libtpu):
    dump(tmp_path, *libtpu)
    found = schedule.pick(schedule.read_schedules(tmp_path), "chunk_attention")
    assert [(block.depth, block.bundles, block.slots["MXU"], block.slots["SALU"]) for block in found.blocks] == [
        (0, 1, 1, 1),
        (1, 2, 2, 2),
    ]
    assert (found.capacity["MXU"], found.capacity["VALU"], found.smem_bytes) == (2, 4, 0x200)


def test_an_unknown_libtpu_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "version", lambda package: "9.9.9")
    dump(tmp_path, "TENSOR, " + REST, *OLD[1:])
    with pytest.raises(schedule.UnknownSchedule, match=r"libtpu 9\.9\.9 .* no column MXU .* known: 0\.0\.42\.1, .*0\.0\.52"):
        schedule.read_schedules(tmp_path)


def test_a_dump_that_is_not_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "version", lambda package: "9.9.9")
    with pytest.raises(schedule.UnknownSchedule, match=r"libtpu 9\.9\.9 .* no dump for chunk_attention"):
        schedule.pick(schedule.read_schedules(tmp_path), "chunk_attention")
