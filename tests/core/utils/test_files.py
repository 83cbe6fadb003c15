"""Files are written whole or not at all."""

import os
import stat
import time

import pytest

from maze.core.utils.files import TEMPORARY_PREFIX, atomic_write, clean_stale_temporaries


def test_the_content_arrives_with_the_usual_mode_and_nothing_is_left_over(tmp_path):
    atomic_write(tmp_path / "a.bin", lambda file: file.write(b"new"))
    (tmp_path / "b.bin").write_bytes(b"")
    assert (tmp_path / "a.bin").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == stat.S_IMODE((tmp_path / "b.bin").stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "b.bin"]


@pytest.mark.parametrize("fault", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(tmp_path, fault):
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")

    def write(file):
        file.write(b"half")
        raise fault

    with pytest.raises(type(fault)):
        atomic_write(target, write)
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_write_that_cannot_be_renamed_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(target, lambda file: file.write(b"new"))
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_process_killed_in_mid_write_leaves_the_old_file_and_a_temporary_that_is_cleaned(tmp_path):
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")
    pid = os.fork()
    if pid == 0:
        atomic_write(target, lambda file: (file.write(b"half"), file.flush(), os.kill(os.getpid(), 9)))
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9
    assert target.read_bytes() == b"old"
    (leftover,) = clean_stale_temporaries(tmp_path)
    assert leftover.name.startswith(TEMPORARY_PREFIX)
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_write_in_progress_is_left_alone(tmp_path):
    unfinished = tmp_path / f"{TEMPORARY_PREFIX}a.bin-x"
    unfinished.touch()
    assert clean_stale_temporaries(tmp_path, min_age=60.0) == []
    os.utime(unfinished, (time.time() - 61.0,) * 2)
    assert clean_stale_temporaries(tmp_path, min_age=60.0) == [unfinished]
