"""Room on the work disk: measured from time to time, and reported by failed writes."""

from __future__ import annotations

import os

from batchwright.batches.send import disk
from batchwright.batches.send.disk import Disk

MIB = 1024 * 1024


def test_the_disk_is_measured_a_few_times_a_second_and_answers_in_flight_need_room(tmp_path):
    now, looks, free = 0.0, 0, 100 * MIB

    def measure(folder):
        nonlocal looks
        looks += 1
        return free

    checked = Disk(tmp_path, reserve=64 * MIB, clock=lambda: now, free=measure)
    assert [checked.has_room(n) for n in (0, 36 * MIB, 36 * MIB + 1)] == [True, True, False]
    assert (looks, checked.trouble is not None) == (1, True)
    free = 200 * MIB
    assert not checked.has_room(37 * MIB)
    now += disk.LOOK_SECONDS
    assert checked.has_room(37 * MIB)
    assert (looks, checked.trouble) == (2, None)


def test_a_failed_write_is_reported_for_a_while_even_if_the_disk_seems_to_have_room(tmp_path):
    """A quota makes writes fail, but is not visible in the measured space."""
    now = 0.0
    checked = Disk(tmp_path, reserve=0, clock=lambda: now, free=lambda folder: 100 * MIB)
    checked.refuse("the quota is used up")
    assert (checked.has_room(0), checked.trouble) == (True, "the quota is used up")
    now += disk.REFUSED_SECONDS
    assert checked.trouble is None


def test_the_free_bytes_are_those_that_this_user_may_write(tmp_path):
    found = os.statvfs(tmp_path)
    assert abs(disk.free_bytes(tmp_path) - found.f_bavail * found.f_frsize) < 10 * MIB
