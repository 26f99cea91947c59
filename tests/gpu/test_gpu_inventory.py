"""Reading the GPUs of a machine through the real nvidia-ml-py on a simulated driver, and what
``robust-train gpus`` shows of them."""

import getpass
import json
import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

import warm
from robust_train.gpu import processes
from robust_train.gpu.bounded import NoAnswerError, ask, printed_by, run_command
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
    Slice,
)

READ = """
import json
from dataclasses import asdict
from robust_train.gpu.inventory import read_inventory
print(json.dumps(asdict(read_inventory())))
"""


def read(machine):
    return machine.python(READ)


def fail_memory(machine, code, where):
    for version in ("", "_v2"):
        machine.fail(f"nvmlDeviceGetMemoryInfo{version}", code, where)


def test_a_gpu_is_told_with_all_its_figures(machine_with):
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
    assert (inventory["driver_version"], inventory["problem"]) == ("575.1", None)
    (gpu,) = inventory["gpus"]
    expected = {
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
        "unusable": None,
        "cuda_index": 0,
    }
    assert gpu.items() >= expected.items()


def test_memory_version_1_answers_where_version_2_fails(machine_with):
    codes = (FUNCTION_NOT_FOUND, UNKNOWN, NOT_SUPPORTED)
    machine = machine_with(*(Gpu(total_mib=1000, free_mib=600, reserved_mib=100) for _ in codes))
    for index, code in enumerate(codes):
        machine.fail("nvmlDeviceGetMemoryInfo_v2", code, index)
    # version 1 counts what is reserved as used
    figures = {(gpu["free_bytes"], gpu["used_bytes"]) for gpu in read(machine)["gpus"]}
    assert figures == {(600 * MIB, 400 * MIB)}


def test_a_gpu_may_lack_a_metric(machine_with):
    """Its value is None."""
    machine = machine_with(Gpu(utilization=None))
    for name in ("ComputeMode", "MigMode", "Name", "PciInfo", "ComputeRunningProcesses"):
        machine.fail(f"nvmlDeviceGet{name}", NOT_SUPPORTED)
    machine.fail("nvmlDeviceGetGraphicsRunningProcesses", NOT_SUPPORTED)
    machine.fail("nvmlSystemGetDriverVersion", UNKNOWN)
    inventory = read(machine)
    (gpu,) = inventory["gpus"]
    assert gpu["utilization_percent"] is gpu["processes"] is inventory["driver_version"] is None
    assert gpu["compute_mode"] == "default"


def test_an_unhealthy_gpu_is_skipped_with_its_reason(machine_with):
    """The others are kept."""
    memory = "nvmlDeviceGetMemoryInfo"
    faults = (
        ("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, "GPU is lost: reboot the host ("),
        ("nvmlDeviceGetUUID", UNKNOWN, "Unknown Error"),
        (memory, NO_PERMISSION, "Insufficient Permissions"),
        (memory, 77, "simulated error 77"),
        (memory, NOT_SUPPORTED, "NVML does not report its memory"),
    )
    machine = machine_with(*(Gpu() for _ in range(len(faults) + 2)))
    for index, (function, code, _) in enumerate(faults, 1):
        machine.fail(function, code, index)
        machine.fail(f"{memory}_v2", UNKNOWN, index)
    inventory = read(machine)
    assert [gpu["index"] for gpu in inventory["gpus"]] == [0, len(faults) + 1]
    assert inventory["problem"] is None
    for sick, (_, _, reason) in zip(inventory["skipped"], faults, strict=True):
        assert reason in sick["reason"]


def test_each_look_sees_whether_gpus_are_healthy(machine_with):
    machine = machine_with(Gpu(), Gpu())
    looks = machine.python(
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
    assert looks == [[[0, 1], []], [[0], [machine.uuid(1)]], [[0, 1], []]]


def test_a_passing_failure_does_not_cost_a_gpu(machine_with):
    machine = machine_with(Gpu())
    fail_memory(machine, TIMEOUT, 0)
    assert read(machine)["skipped"] == [{"index": 0, "reason": "Timeout", "uuid": machine.uuid(0)}]
    # asked a second time before it is given up
    assert len(machine.calls("nvmlDeviceGetMemoryInfo")) == 2


def test_slices_replace_their_gpu(machine_with):
    """A broken slice costs no other."""
    slices = [Slice(19968, name="NVIDIA A100 MIG 3g.20gb"), Slice(9856, free_mib=100), Slice(1000)]
    machine = machine_with(Gpu(), Gpu(mig=slices), Gpu(mig=[], mig_mode=0), Gpu(mig=[]))
    fail_memory(machine, NO_PERMISSION, 1)  # as a container sees the parent
    fail_memory(machine, UNKNOWN, "1.mig.2")
    machine.update(1, compute_mode=2)
    inventory = read(machine)
    uuids = [machine.uuid(0), machine.uuid(1, 0), machine.uuid(1, 1), machine.uuid(2)]
    assert [gpu["uuid"] for gpu in inventory["gpus"]] == uuids
    first, second = inventory["gpus"][1:3]
    assert (first["name"], first["index"]) == ("NVIDIA A100 MIG 3g.20gb", 1)
    assert (first["total_bytes"], second["free_bytes"]) == (19968 * MIB, 100 * MIB)
    assert first["parent_uuid"] == second["parent_uuid"] == machine.uuid(1)
    assert first["unusable"] == "compute mode is prohibited"  # the mode is that of the whole GPU
    assert "no slice exists" in inventory["skipped"][0]["reason"]


def test_impossible_figures_cost_no_gpu(machine_with):
    """A compute mode of the future; a name that ends in the middle of a letter."""
    gpus = read(machine_with(Gpu(compute_mode=7), Gpu("ü" * 60), Gpu("T4")))["gpus"]
    assert [gpu["compute_mode"] for gpu in gpus] == ["unknown (7)", "default", "default"]
    assert [gpu["name"] for gpu in gpus] == ["NVIDIA A100-SXM4-40GB", "unknown GPU", "T4"]


def test_an_integrated_gpu_has_its_hosts_memory(machine_with):
    """No other kind of GPU has it."""
    integrated = ("NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)")
    cards = ("NVIDIA GB100", "NVIDIA GH200 480GB", "Tesla T4")
    names = integrated * 2 + cards
    machine = machine_with(*(Gpu(name, 0 if n > 2 else 1000) for n, name in enumerate(names)))
    for index in range(3):
        fail_memory(machine, NOT_SUPPORTED, index)
    inventory = read(machine)
    assert [gpu["index"] for gpu in inventory["gpus"]] == list(range(6))
    for gpu in inventory["gpus"]:
        assert gpu["unified_memory"]
        assert gpu["total_bytes"] == psutil.virtual_memory().total
        assert 0 < gpu["free_bytes"] <= gpu["total_bytes"]
    assert all("a total of 0" in skipped["reason"] for skipped in inventory["skipped"])


def test_an_owned_exclusive_gpu_is_unusable(machine_with):
    """Only for as long as someone owns it."""
    machine = machine_with(
        Gpu(compute_mode=3, compute=[(4711, 10)]), Gpu(compute_mode=3, graphics=[(4712, 10)])
    )
    without_processes = READ.replace("read_inventory()", "read_inventory(processes=False)")
    owned, free = machine.python(without_processes)["gpus"]
    assert "4711 owns it" in owned["unusable"]
    assert (owned["owned"], free["owned"]) == (True, False), "its owner may end"
    assert owned["processes"] is free["unusable"] is None
    machine.update(0, recovery=1)
    sick, _ = machine.python(without_processes)["gpus"]
    assert (sick["owned"], "has to be reset" in sick["unusable"]) == (False, True)


def test_exclusive_mode_owned_by_mps_is_no_obstacle(machine_with, tmp_path):
    def mps(program=READ, **environ):
        (gpu,) = machine.python(program, **environ)["gpus"]
        assert (gpu["unusable"] is None) == gpu["mps"]
        return gpu["mps"]

    server = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy("/bin/sleep", server)
    machine = machine_with(Gpu(compute_mode=3))
    with subprocess.Popen([server, "100"]) as running:
        machine.update(0, compute=[(running.pid, 500)])
        assert mps()
        running.kill()
    machine.update(0, compute=[(os.getpid(), 500)])
    assert not mps()
    # in a container the server's number is another machine's, and its pipes tell
    in_a_container = "from robust_train.gpu import processes\n"
    in_a_container += "processes.sees_host_pids = lambda: False\n" + READ
    (tmp_path / "control").touch()
    assert mps(in_a_container, CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))


def test_processes_of_both_lists_are_merged(machine_with):
    """Unknown memory is None."""
    machine = machine_with(
        Gpu(compute=[(10, 500), (11, None), (12, None)], graphics=[(10, 20), (12, 30), (13, 40)])
    )
    (gpu,) = read(machine)["gpus"]
    held = {process["pid"]: process["used_bytes"] for process in gpu["processes"]}
    assert held == {10: 500 * MIB, 11: None, 12: 30 * MIB, 13: 40 * MIB}
    assert {p["pid"] for p in gpu["processes"] if p["computes"]} == {10, 11, 12}


def test_polling_lists_no_processes(machine_with):
    """A fork opens a session of its own."""
    machine = machine_with(Gpu(), Gpu())
    machine.python(
        """
        import os
        from robust_train.gpu.inventory import read_inventory
        for _ in range(5):
            assert len(read_inventory(processes=False).gpus) == 2
        child = os.fork()
        if child == 0:
            os._exit(0 if len(read_inventory(processes=False).gpus) == 2 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(read_inventory(processes=False).gpus) == 2
        print(0)
        """
    )
    assert machine.calls("nvmlDeviceGetComputeRunningProcesses") == []
    assert len(machine.calls("nvmlDeviceGetUUID")) == 2 * 2
    (parent, _), (child, _) = machine.calls("nvmlInit")
    assert parent != child
    lines = [line.split() for line in (machine.folder / "calls").read_text().splitlines()]
    # nothing is asked of the session that the child inherited
    assert next(name for pid, name, _ in lines if int(pid) == child) == "nvmlInit"


def test_a_driver_that_was_reloaded_is_opened_again(machine_with):
    """And a closed session lets the GPUs be reset."""
    machine = machine_with(Gpu())
    assert machine.python(
        """
        import json
        import pynvml
        from robust_train.gpu.inventory import close_session, known_session, read_inventory
        first = read_inventory()
        pynvml.nvmlShutdown()
        assert read_inventory() == first
        close_session()
        closed = known_session() is None
        close_session()
        print(json.dumps(closed and read_inventory() == first))
        """
    )
    assert len(machine.calls("nvmlShutdown")) == 2


def test_each_lack_of_gpus_has_its_sentence(machine_with, tmp_path):
    machine = machine_with()
    assert "no NVIDIA GPU on this machine (driver 570.86.15)" in read(machine)["problem"]
    for code, *words in (
        (VERSION_MISMATCH, "reboot", "restart the container"),
        (DRIVER_NOT_LOADED, "not loaded"),
        (UNKNOWN, "Unknown Error"),
    ):
        machine.fail("nvmlInit", code)
        problem = read(machine)["problem"]
        assert all(word in problem for word in words), problem
    machine.alone = True
    (tmp_path / "libnvidia-ml.so.1").touch()  # also hides a real one that this machine may have
    light = "import robust_train.cli.machine, robust_train.queue.waiting, sys"
    light += "\nassert not {'torch', 'rich'} & {*sys.modules}"
    problem = machine.python(READ + light, LD_LIBRARY_PATH=str(tmp_path))["problem"]
    assert "no NVIDIA driver" in problem
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): pass\n")
    problem = machine.python(READ, PYTHONPATH=str(tmp_path))["problem"]
    assert "legacy package" in problem
    assert "pip uninstall pynvml" in problem


@pytest.mark.parametrize("in_container", [False, True])
def test_only_the_hosts_process_ids_have_names(monkeypatch, in_container):
    monkeypatch.setattr(processes, "sees_host_pids", lambda: not in_container)
    listed = (GpuProcess(os.getpid()), GpuProcess(2**30))
    gpu = GpuInfo("GPU-1", "A", 0, "", 10, 5, 5, processes=listed)
    holders = processes.find_holders([gpu])
    assert list(holders) == ([] if in_container else [os.getpid()])
    assert all(holder.user == getpass.getuser() for holder in holders.values())


def test_cuda_indices_require_two_agreeing_lists(machine_with):
    """Both lists must surely agree."""
    machine = machine_with(Gpu(), Gpu())
    assert [gpu["cuda_index"] for gpu in read(machine)["gpus"]] == [0, 1]
    fail_memory(machine, UNKNOWN, 0)
    assert [gpu["cuda_index"] for gpu in read(machine)["gpus"]] == [None]
    sliced = read(machine_with(Gpu(mig=[Slice(5000)]), Gpu()))
    assert [gpu["cuda_index"] for gpu in sliced["gpus"]] == [None, None]


def test_each_recovery_of_the_driver_has_words(machine_with):
    """The driver asks for a reset or the like, and a line says so."""
    words = (
        *("to be reset", "rebooted", "drained of peer", "drained and reset", "restart nvidia-imex"),
        *("does not suffice", "NVLink switches", "needs recovery action 8"),
    )
    machine = machine_with(*(Gpu(recovery=action) for action in range(len(words) + 1)))
    healthy, *others = read(machine)["gpus"]
    assert healthy["unusable"] is None
    for gpu, expected in zip(others, words, strict=True):
        assert expected in gpu["unusable"]


# --- the command ---


def run(machine, *arguments, **environ):
    done = warm.robust_train("gpus", *arguments, environ=machine.environment(**environ))
    assert done.returncode == 0, done.stderr
    return done


def test_a_pipe_gets_aligned_columns(machine_with):
    """They include processes by user and command."""
    compute = [(2**30, 9), (os.getpid(), 700)]
    machine = machine_with(
        Gpu(total_mib=40960, free_mib=2200, reserved_mib=560, utilization=63, compute=compute),
        Gpu(name="T4", total_mib=15000, utilization=None),
    )
    done = run(machine)
    header, first, second = done.stdout.splitlines()
    assert header.split("  ")[0] == "index"
    for words in ("NVIDIA A100-SXM4-40GB", machine.uuid(0), "38200", "2200", "40960", "63%"):
        assert words in first
    command = Path("/proc/self/comm").read_text().strip()
    in_host = os.readlink("/proc/self/ns/pid") == processes.INITIAL_PID_NAMESPACE
    mine = f":{command}({os.getpid()})" if in_host else f"pid {os.getpid()}"
    for words in (f"pid {2**30} 9 MiB", f"{mine} 700 MiB"):
        assert words in first
    end = header.index("total MiB") + len("total MiB")
    assert first[:end].endswith(" 40960")
    assert second[:end].endswith(" 15000")
    assert "\x1b" not in done.stdout


def test_skipped_and_hidden_gpus_have_a_reason(machine_with):
    """The list of GPUs has them too."""
    machine = machine_with(Gpu(), Gpu(compute_mode=2, compute=[(2**30, 9)]), Gpu())
    machine.fail("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, 2)
    done = run(machine, CUDA_VISIBLE_DEVICES=f"{machine.uuid(0)},GPU-x")
    _, first, second, third = done.stdout.splitlines()
    assert "hidden" not in first
    assert "hidden by CUDA_VISIBLE_DEVICES; compute mode is prohibited" in second
    assert third.startswith("GPU 2 skipped: GPU is lost: reboot")
    assert "warning: CUDA_VISIBLE_DEVICES=" in done.stderr
    assert "'GPU-x'" in done.stderr
    done = run(machine, "--json", CUDA_VISIBLE_DEVICES="")
    told = json.loads(done.stdout)
    assert [gpu["visible"] for gpu in told["gpus"]] == [False, False]
    assert done.stderr == "", "they are hidden on purpose"
    (process,) = told["gpus"][1]["processes"]
    expected = {"pid": 2**30, "used_bytes": 9 * MIB, "computes": True}
    assert process == {**expected, "command": None, "user": None}
    (skipped,) = told["skipped"]
    assert (skipped["index"], skipped["uuid"]) == (2, None)
    assert told["driver_version"] == "570.86.15"


# --- commands and calls that hang ---


def test_a_slow_command_is_killed_or_abandoned():
    """What holds its output open stands for a child that waits in the driver."""
    with pytest.raises(NoAnswerError, match=r"sleep has not ended after 0\.2 s"):
        run_command(["sleep", "100"], 0.2)
    assert printed_by(["sh", "-c", "sleep 3 & exec sleep 100"], 0.2) is None
    assert printed_by(["sh", "-c", "echo one; exit 3"], 60) is None
    assert printed_by(["sh", "-c", "echo $WHICH"], 60, {"WHICH": "two"}) == b"two\n"
    assert printed_by(["no-such-program"], 60) is None


def test_an_answer_after_a_suspension_counts():
    """For example after Ctrl-Z and fg in the middle of a call: no time is left, and nothing
    hangs.
    """
    assert ask(lambda: sum(n % 2 for n in range(500_000)), 0.0) == 250_000
