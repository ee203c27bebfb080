"""A disk that a test can fill."""

import os
import subprocess
from functools import partial

import pytest


@pytest.fixture
def disk(tmp_path):
    """A disk of 6 MiB, which only root can mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "chunkattn-test", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def fill(disk):
    """Return a function that takes all space that is left on the disk."""
    return partial(_fill, disk)


def _fill(disk):
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    assert os.statvfs(disk).f_bavail == 0
