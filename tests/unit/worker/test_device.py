"""Cores and memory as containers limit them, on made-up file systems."""

import os

import pytest

from trimaran.worker.device import allowed_threads, free_memory_bytes

GIB = 1 << 30
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def root(tmp_path):
    """A machine without limits: 8 GiB available."""

    def write(**files: str):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    write(**{"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n"})
    return write


def cgroup(*lines: str) -> dict[str, str]:
    return {"proc/self/cgroup": "".join(f"{line}\n" for line in lines)}


def test_without_limits(root):
    assert allowed_threads(None, root()).count == CORES
    assert free_memory_bytes(root()) == 8 * GIB


def test_a_request_wins(root):
    assert allowed_threads(CORES + 5, root()).count == CORES + 5


@pytest.mark.parametrize(
    ("quota", "count"),
    [("max 100000", CORES), ("50000 100000", 1), ("199000 100000", 1), ("9999999 1000", CORES)],
)
def test_quota_v2_rounds_down_to_at_least_one(root, quota, count):
    files = cgroup("0::/pod") | {"sys/fs/cgroup/pod/cpu.max": quota + "\n"}
    assert allowed_threads(None, root(**files)).count == min(count, CORES)


def test_the_tightest_folder_above_counts(root):
    files = cgroup("0::/a/b/c") | {
        "sys/fs/cgroup/a/b/c/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.max": "100000 100000",
        "sys/fs/cgroup/a/b/memory.max": str(3 * GIB),
        "sys/fs/cgroup/a/b/memory.current": str(GIB),
        "sys/fs/cgroup/a/memory.max": str(6 * GIB),
        "sys/fs/cgroup/a/memory.current": str(GIB),
    }
    assert allowed_threads(None, root(**files)).count == 1
    assert free_memory_bytes(root()) == 2 * GIB


def test_v1_limits_at_a_mount_that_begins_at_the_containers_folder(root):
    files = cgroup("5:cpu,cpuacct:/docker/xyz", "4:memory:/docker/xyz", "0::/") | {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/memory.stat": (
            f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB // 2}\n"
        ),
    }
    assert allowed_threads(None, root(**files)).count == 1
    assert free_memory_bytes(root()) == 2.5 * GIB


def test_v1_without_a_quota(root):
    files = cgroup("1:cpu:/") | {
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert allowed_threads(None, root(**files)).count == CORES


def test_file_pages_are_free_memory_and_a_path_outside_is_not_followed(root):
    files = cgroup("0::/../other") | {
        "sys/fs/cgroup/memory.max": str(GIB),
        "sys/fs/cgroup/memory.current": str(GIB),
        "sys/fs/cgroup/memory.stat": f"anon 1\nactive_file {GIB // 4}\ninactive_file 0\n",
        "sys/fs/other/memory.max": "1",
        "sys/fs/other/memory.current": "1",
    }
    assert free_memory_bytes(root(**files)) == GIB // 4


def test_a_cgroup_over_its_limit_leaves_nothing(root):
    files = cgroup("0::/") | {
        "sys/fs/cgroup/memory.max": "1000",
        "sys/fs/cgroup/memory.current": "2000",
    }
    assert free_memory_bytes(root(**files)) == 0


def test_the_machine_of_this_test():
    assert 1 <= allowed_threads(None).count <= CORES
    assert 0 < free_memory_bytes() < 1 << 50
