"""Reading the GPUs of a machine through the real nvidia-ml-py on a simulated driver."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from robust_train.gpu import processes
from robust_train.model.gpu import GpuInfo, GpuProcess
from simulated_nvml import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    MIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    TIMEOUT,
    UNKNOWN,
    VERSION_MISMATCH,
    Gpu,
    Machine,
    Slice,
)

MachineWith = Callable[..., Machine]

READ = """
import json
from dataclasses import asdict
from robust_train.gpu.inventory import read_inventory
print(json.dumps(asdict(read_inventory())))
"""


def read(machine: Machine) -> dict[str, Any]:
    inventory: dict[str, Any] = machine.python(READ)
    return inventory


def test_a_gpu_is_told_with_all_its_figures(machine_with: MachineWith) -> None:
    machine = machine_with(
        Gpu(
            name="NVIDIA H100 80GB HBM3",
            total_mib=81559,
            free_mib=60000,
            reserved_mib=559,
            utilization=37,
            pci="0000000A:C1:00.0",
        ),
        driver="575.1",
    )
    inventory = read(machine)
    assert inventory["driver_version"] == "575.1"
    assert inventory["problem"] is None
    assert inventory["gpus"] == [
        {
            "uuid": machine.uuid(0),
            "name": "NVIDIA H100 80GB HBM3",
            "index": 0,
            "pci_bus_id": "0000000a:c1:00.0",
            "total_bytes": 81559 * MIB,
            "free_bytes": 60000 * MIB,
            "used_bytes": 21000 * MIB,
            "utilization_percent": 37,
            "compute_mode": "default",
            "processes": [],
            "parent_uuid": None,
            "unified_memory": False,
            "throttled": None,
            "unusable": None,
            "failed_jobs": 0,
            "mps": False,
            "cuda_index": 0,
        }
    ]


@pytest.mark.parametrize("code", [FUNCTION_NOT_FOUND, UNKNOWN, NOT_SUPPORTED])
def test_memory_version_1_answers_where_version_2_fails(machine_with, code):
    machine = machine_with(Gpu(total_mib=1000, free_mib=600, reserved_mib=100))
    machine.fail("nvmlDeviceGetMemoryInfo_v2", code)
    (gpu,) = read(machine)["gpus"]
    assert gpu["free_bytes"] == 600 * MIB
    assert gpu["used_bytes"] == 400 * MIB  # version 1 counts what is reserved as used


def test_a_metric_that_a_gpu_lacks_is_none_and_the_gpu_is_kept(machine_with: MachineWith) -> None:
    machine = machine_with(Gpu(utilization=None))
    for function in ("ComputeMode", "MigMode", "Name", "PciInfo"):
        machine.fail(f"nvmlDeviceGet{function}", NOT_SUPPORTED)
    machine.fail("nvmlSystemGetDriverVersion", UNKNOWN)
    for kind in ("Compute", "Graphics"):
        machine.fail(f"nvmlDeviceGet{kind}RunningProcesses", NOT_SUPPORTED)
    inventory = read(machine)
    (gpu,) = inventory["gpus"]
    assert gpu["utilization_percent"] is None
    assert gpu["processes"] is None
    assert gpu["compute_mode"] == "default"
    assert inventory["driver_version"] is None


@pytest.mark.parametrize(
    ("function", "code", "reason"),
    [
        ("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, "GPU is lost"),
        ("nvmlDeviceGetUUID", UNKNOWN, "Unknown Error"),
        ("nvmlDeviceGetMemoryInfo", NO_PERMISSION, "Insufficient Permissions"),
        ("nvmlDeviceGetMemoryInfo", 77, "simulated error 77"),
        ("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED, "NVML does not report its memory"),
    ],
)
def test_one_sick_gpu_is_skipped_with_its_reason_and_the_others_are_kept(
    machine_with, function, code, reason
):
    machine = machine_with(Gpu(), Gpu(), Gpu())
    machine.fail(function, code, 1)
    machine.fail("nvmlDeviceGetMemoryInfo_v2", UNKNOWN, 1)
    inventory = read(machine)
    assert [gpu["uuid"] for gpu in inventory["gpus"]] == [machine.uuid(0), machine.uuid(2)]
    (sick,) = inventory["skipped"]
    assert sick["index"] == 1
    assert reason in sick["reason"]
    assert inventory["problem"] is None


def test_a_gpu_that_heals_or_falls_sick_is_seen_at_the_next_look(machine_with: MachineWith) -> None:
    machine = machine_with(Gpu(), Gpu())
    found = machine.python(
        """
        import json, os
        from robust_train.gpu.inventory import read_inventory
        state = os.environ["SIMULATED_NVML_STATE"]
        healthy = open(state).read()
        def look(more):
            open(state + ".new", "w").write(healthy + more)
            os.replace(state + ".new", state)
            inventory = read_inventory(processes=False)
            return [[g.index for g in inventory.gpus], [s.uuid for s in inventory.skipped]]
        lost = "error.nvmlDeviceGetMemoryInfo.1 15\\nerror.nvmlDeviceGetMemoryInfo_v2.1 15\\n"
        print(json.dumps([look(""), look(lost), look("")]))
        """
    )
    assert found == [[[0, 1], []], [[0], [machine.uuid(1)]], [[0, 1], []]]


def test_a_passing_failure_does_not_cost_a_gpu(machine_with: MachineWith) -> None:
    machine = machine_with(Gpu())
    machine.fail("nvmlDeviceGetMemoryInfo_v2", TIMEOUT)
    machine.fail("nvmlDeviceGetMemoryInfo", TIMEOUT)
    assert read(machine)["skipped"] == [{"index": 0, "reason": "Timeout", "uuid": machine.uuid(0)}]
    # asked a second time before it is given up
    assert len(machine.calls("nvmlDeviceGetMemoryInfo")) == 2


def test_slices_stand_in_place_of_their_gpu(machine_with: MachineWith) -> None:
    slices = [Slice(19968, name="NVIDIA A100 MIG 3g.20gb"), Slice(9856, free_mib=100)]
    machine = machine_with(Gpu(), Gpu(mig=slices), Gpu(mig=[], mig_mode=0))
    machine.fail("nvmlDeviceGetMemoryInfo_v2", NO_PERMISSION, 1)  # as a container sees the parent
    machine.fail("nvmlDeviceGetMemoryInfo", NO_PERMISSION, 1)
    machine.update(1, compute_mode=2)
    inventory = read(machine)
    uuids = [machine.uuid(0), machine.uuid(1, 0), machine.uuid(1, 1), machine.uuid(2)]
    assert [gpu["uuid"] for gpu in inventory["gpus"]] == uuids
    first, second = inventory["gpus"][1:3]
    assert first["name"] == "NVIDIA A100 MIG 3g.20gb"
    assert (first["total_bytes"], second["free_bytes"]) == (19968 * MIB, 100 * MIB)
    assert first["parent_uuid"] == second["parent_uuid"] == machine.uuid(1)
    assert first["index"] == 1
    assert first["unusable"] == "compute mode is prohibited"  # the mode is that of the whole GPU


def test_a_broken_slice_does_not_cost_the_others_and_a_gpu_without_any_is_skipped(machine_with):
    machine = machine_with(Gpu(mig=[Slice(1000), Slice(2000)]), Gpu(mig=[]))
    for function in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"):
        machine.fail(function, UNKNOWN, "0.mig.0")
    inventory = read(machine)
    assert [gpu["uuid"] for gpu in inventory["gpus"]] == [machine.uuid(0, 1)]
    assert "no slice has been made" in inventory["skipped"][0]["reason"]


@pytest.mark.parametrize("name", ["NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)"])
@pytest.mark.parametrize("total_mib", [0, 1000])
def test_an_integrated_gpu_has_the_memory_of_its_host(machine_with, name, total_mib):
    machine = machine_with(Gpu(name=name, total_mib=total_mib))
    for function in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo") if total_mib else ():
        machine.fail(function, NOT_SUPPORTED)
    (gpu,) = read(machine)["gpus"]
    assert gpu["unified_memory"]
    assert gpu["total_bytes"] == psutil.virtual_memory().total
    assert 0 < gpu["free_bytes"] <= gpu["total_bytes"]


def test_cards_with_memory_of_their_own_are_not_taken_for_integrated(machine_with):
    names = ("NVIDIA GB100", "NVIDIA GH200 480GB", "Tesla T4")
    inventory = read(machine_with(*(Gpu(name=name, total_mib=0) for name in names)))
    assert inventory["gpus"] == []
    assert all("a total of 0" in one["reason"] for one in inventory["skipped"])


def test_an_exclusive_gpu_is_unusable_only_while_someone_owns_it(machine_with: MachineWith) -> None:
    machine = machine_with(
        Gpu(compute_mode=3, compute=[(4711, 10)]), Gpu(compute_mode=3, graphics=[(4712, 10)])
    )
    without_processes = READ.replace("read_inventory()", "read_inventory(processes=False)")
    owned, free = machine.python(without_processes)["gpus"]
    assert "4711" in owned["unusable"]
    assert owned["processes"] is None
    assert free["unusable"] is None


def test_processes_are_merged_from_both_lists_and_unknown_memory_is_none(machine_with):
    machine = machine_with(
        Gpu(compute=[(10, 500), (11, None), (12, None)], graphics=[(10, 20), (12, 30), (13, 40)])
    )
    (gpu,) = read(machine)["gpus"]
    held = {process["pid"]: process["used_bytes"] for process in gpu["processes"]}
    assert held == {10: 500 * MIB, 11: None, 12: 30 * MIB, 13: 40 * MIB}
    assert {p["pid"] for p in gpu["processes"] if p["computes"]} == {10, 11, 12}


def test_polling_asks_for_no_process_lists_and_opens_nvml_once(machine_with: MachineWith) -> None:
    machine = machine_with(Gpu(), Gpu())
    machine.python(
        """
        from robust_train.gpu.inventory import read_inventory
        for _ in range(5):
            assert len(read_inventory(processes=False).gpus) == 2
        print(0)
        """
    )
    assert machine.calls("nvmlDeviceGetComputeRunningProcesses") == []
    assert len(machine.calls("nvmlInit")) == 1
    assert len(machine.calls("nvmlDeviceGetUUID")) == 2


def test_a_forked_process_opens_its_own_session(machine_with: MachineWith) -> None:
    machine = machine_with(Gpu(), Gpu())
    machine.python(
        """
        import os
        from robust_train.gpu.inventory import read_inventory
        assert len(read_inventory().gpus) == 2
        child = os.fork()
        if child == 0:
            os._exit(0 if len(read_inventory().gpus) == 2 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(read_inventory().gpus) == 2
        print(0)
        """
    )
    (parent, _), (child, _) = machine.calls("nvmlInit")
    assert parent != child
    lines = [line.split() for line in (machine.folder / "calls").read_text().splitlines()]
    # nothing is asked of the session that the child inherited
    assert next(name for pid, name, _ in lines if int(pid) == child) == "nvmlInit"


def test_a_driver_that_was_reloaded_is_opened_again(machine_with: MachineWith) -> None:
    machine = machine_with(Gpu())
    count = machine.python(
        """
        import pynvml
        from robust_train.gpu.inventory import read_inventory
        read_inventory()
        pynvml.nvmlShutdown()
        print(len(read_inventory().gpus))
        """
    )
    assert count == 1


def test_each_way_of_having_no_gpu_has_its_own_sentence(machine_with, tmp_path):
    machine = machine_with()
    no_gpus = read(machine)["problem"]
    machine.fail("nvmlInit", VERSION_MISMATCH)
    mismatch = read(machine)["problem"]
    machine.fail("nvmlInit", DRIVER_NOT_LOADED)
    not_loaded = read(machine)["problem"]
    machine.fail("nvmlInit", UNKNOWN)
    unknown = read(machine)["problem"]
    machine.alone = True
    (tmp_path / "libnvidia-ml.so.1").touch()  # also hides a real one that this machine may have
    missing = machine.python(READ, LD_LIBRARY_PATH=str(tmp_path))["problem"]
    assert "no NVIDIA GPU" in no_gpus
    assert "570.86.15" in no_gpus
    assert "reboot" in mismatch
    assert "restart the container" in mismatch
    assert "not loaded" in not_loaded
    assert "Unknown Error" in unknown
    assert "no NVIDIA driver" in missing
    assert len({no_gpus, mismatch, not_loaded, unknown, missing}) == 5


def test_a_legacy_package_that_shadows_the_binding_is_named(machine_with, tmp_path):
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "pynvml.py").write_text("def nvmlInit(): pass\n")
    machine = machine_with(Gpu())
    machine.alone = True
    problem = machine.python(READ, PYTHONPATH=str(shadow))["problem"]
    assert "legacy package" in problem
    assert "pip uninstall pynvml" in problem


def test_reading_imports_no_torch(machine_with: MachineWith) -> None:
    machine = machine_with(Gpu())
    machine.alone = True
    assert machine.python(
        """
        import json, sys
        import robust_train.cli.machine, robust_train.gpu.select, robust_train.queue.waiting
        from robust_train.gpu.inventory import read_inventory
        read_inventory()
        print(json.dumps("torch" not in sys.modules and "rich" not in sys.modules))
        """
    )


@pytest.mark.parametrize("in_container", [False, True])
def test_processes_are_named_only_where_their_ids_are_the_hosts(monkeypatch, in_container):
    monkeypatch.setattr(processes, "sees_host_pids", lambda: not in_container)
    listed = (GpuProcess(os.getpid()), GpuProcess(2**30))
    gpu = GpuInfo("GPU-1", "A", 0, "", 10, 5, 5, processes=listed)
    found = processes.find_holders([gpu])
    assert list(found) == ([] if in_container else [os.getpid()])
    assert all(holder.user == getpass.getuser() for holder in found.values())


def test_exclusive_mode_owned_by_mps_is_no_obstacle(machine_with, tmp_path):
    server = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy("/bin/sleep", server)
    machine = machine_with(Gpu(compute_mode=3))
    with subprocess.Popen([server, "100"]) as running:
        machine.update(0, compute=[(running.pid, 500)])
        (shared,) = read(machine)["gpus"]
        running.kill()
    assert (shared["unusable"], shared["mps"]) == (None, True)
    machine.update(0, compute=[(os.getpid(), 500)])
    (owned,) = read(machine)["gpus"]
    assert "owns it" in owned["unusable"]
    assert not owned["mps"]


def test_a_closed_session_lets_the_gpus_be_reset_and_the_next_call_opens_another(machine_with):
    machine = machine_with(Gpu())
    assert machine.python(
        """
        import json
        from robust_train.gpu.inventory import read_inventory
        from robust_train.gpu.inventory import close_session, known_session
        first = read_inventory()
        close_session()
        closed = known_session() is None
        close_session()
        print(json.dumps(closed and read_inventory() == first))
        """
    )
    assert machine.calls("nvmlShutdown")


@pytest.mark.parametrize("sliced", [False, True])
def test_cudas_numbers_are_known_where_both_lists_surely_agree(machine_with, sliced):
    machine = machine_with(Gpu(mig=[Slice(5000)] if sliced else None), Gpu())
    seen = [gpu["cuda_index"] for gpu in read(machine)["gpus"]]
    assert seen == ([None, None] if sliced else [0, 1])
    if not sliced:
        for version in ("", "_v2"):
            machine.fail(f"nvmlDeviceGetMemoryInfo{version}", UNKNOWN, 0)
        assert [gpu["cuda_index"] for gpu in read(machine)["gpus"]] == [None]


def test_each_recovery_that_the_driver_asks_for_has_words(machine_with: MachineWith) -> None:
    words = (
        *("to be reset", "rebooted", "drained of peer", "drained and reset", "restart nvidia-imex"),
        *("does not suffice", "NVLink switches", "needs recovery action 8"),
    )
    machine = machine_with(*(Gpu(recovery=action) for action in range(len(words) + 1)))
    healthy, *others = read(machine)["gpus"]
    assert healthy["unusable"] is None
    for gpu, expected in zip(others, words, strict=True):
        assert expected in gpu["unusable"]


def test_in_a_container_mps_is_known_by_its_pipes(machine_with, tmp_path):
    """The server's number is another machine's here: no process has it."""
    in_a_container = "from robust_train.gpu import processes\n"
    in_a_container += "processes.sees_host_pids = lambda: False\n" + READ
    machine = machine_with(Gpu(compute_mode=3, compute=[(2**30, 500)]))
    (owned,) = read(machine)["gpus"]
    assert "owns it" in owned["unusable"]
    (tmp_path / "control").touch()
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    (shared,) = machine.python(in_a_container, **pipes)["gpus"]
    assert (shared["unusable"], shared["mps"]) == (None, True)
