"""Which CPUs a worker or rank runs on, from a machine's /sys and nvidia-smi's list."""

import os

import pytest
from paceline.common import numa
from paceline.common.numa import bind_near, choose, gpu_of, numa_nodes, parse_cpus, parse_gpus

LISTED = """\
0, GPU-aaaa1111-2222, 00000000:1B:00.0, NVIDIA H200
1, GPU-bbbb1111-2222, 00000000:43:00.0, NVIDIA H200
2, GPU-bbbb9999-2222, 00000000:A1:00.0, NVIDIA H200
3, GPU-dddd1111-2222, 00000000:C5:00.0, NVIDIA H200
"""
GPUS = parse_gpus(LISTED)


@pytest.fixture
def machine(tmp_path):
    """Two nodes of four CPUs each, and one of memory alone; GPUs 0 and 1 on the first, 2 on the second, 3 on none."""
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for pci, node in (("0000:1b:00.0", 0), ("0000:43:00.0", 0), ("0000:a1:00.0", 1), ("0000:c5:00.0", -1)):
        folder = tmp_path / "bus/pci/devices" / pci
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_lists_of_cpus():
    assert parse_cpus("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11} and parse_cpus("\n") == frozenset()
    with pytest.raises(ValueError):
        parse_cpus("a-b")


def test_nodes_without_cpus_do_not_count(machine):
    assert numa_nodes(machine) == {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}
    assert numa_nodes(machine / "nowhere") == {}


@pytest.mark.parametrize(
    ("device", "visible", "allowed", "cpus", "said"),
    [
        ("cuda:0", None, range(8), {0, 1, 4, 5}, "bound to NUMA node 0 of cuda:0: 4 CPUs"),
        ("cuda:2", None, range(8), {2, 3, 6, 7}, "bound to NUMA node 1 of cuda:2: 4 CPUs"),
        ("cuda:2", None, [0, 1, 6], {6}, "bound to NUMA node 1 of cuda:2: 1 CPUs"),
        ("cuda:0", "2,1", range(8), {2, 3, 6, 7}, "bound to NUMA node 1 of cuda:0: 4 CPUs"),
        ("cuda:1", "GPU-aaaa,GPU-bbbb9", range(8), {2, 3, 6, 7}, "bound to NUMA node 1 of cuda:1: 4 CPUs"),
        ("cuda:2", None, [0, 1], None, "bound to NUMA node 0 already"),
        ("cuda:3", None, range(8), None, "not bound to a NUMA node: the kernel names none for cuda:3 (0000:c5:00.0)"),
        ("cuda:0", "GPU-bbbb", range(8), None, "not bound to a NUMA node: which GPU cuda:0 is cannot be told"),
        ("cuda:1", "2", range(8), None, "not bound to a NUMA node: which GPU cuda:1 is cannot be told"),
        ("cuda:9", None, range(8), None, "not bound to a NUMA node: which GPU cuda:9 is cannot be told"),
    ],
)
def test_a_process_goes_to_its_gpus_node(machine, device, visible, allowed, cpus, said):
    choice = choose(device, numa_nodes(machine), GPUS, set(allowed), visible, machine)
    assert (choice.cpus, choice.text) == (cpus, said)


def test_an_index_tells_nothing_where_gpus_differ(monkeypatch):
    mixed = parse_gpus(LISTED.replace("43:00.0, NVIDIA H200", "43:00.0, NVIDIA L4"))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert gpu_of("cuda:0", mixed, None) is None
    assert gpu_of("cuda:0", mixed, "GPU-dddd") == mixed[3]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert gpu_of("cuda:1", mixed, None) == mixed[1]


def test_threads_started_later_run_there_too(machine, monkeypatch):
    """The process of the test itself is bound to one of its CPUs, and back."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two CPUs")
    one, *others = sorted(before)
    (machine / "devices/system/node/node0/cpulist").write_text(",".join(map(str, others)))
    (machine / "devices/system/node/node1/cpulist").write_text(str(one))
    monkeypatch.setattr(numa, "gpus", lambda: GPUS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert bind_near("cpu", root=machine) == ""
    assert os.sched_getaffinity(0) == before
    try:
        assert bind_near("cuda:2", root=machine) == "bound to NUMA node 1 of cuda:2: 1 CPUs"
        found = []
        import threading

        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert found == [{one}]
    finally:
        os.sched_setaffinity(0, before)


def test_one_node_is_left_alone(machine, monkeypatch):
    (machine / "devices/system/node/node1/cpulist").write_text("\n")
    monkeypatch.setattr(numa, "gpus", lambda: pytest.fail("nothing to ask"))
    assert bind_near("cuda:0", root=machine) == ""
