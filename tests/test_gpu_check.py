"""``just gpu-check`` without a GPU says so in a line; how its table and exit code come about."""

import contextlib
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import failing_trainers
from cuda_on_the_cpu import cuda_on_the_cpu
from robust_train.cli.doctor import probe_here
from robust_train.features.memory_samples.sampler import Sampler
from robust_train.memory import in_use
from robust_train.model.gpu import GpuInfo, GpuProcess, Inventory
from robust_train.readable import GIB, MIB
from simulated_nvml import Gpu
from world import ROOT

SPEC = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks/gpu_check.py")
gpu_check = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_check"] = gpu_check
BEFORE = list(sys.path)
SPEC.loader.exec_module(gpu_check)
sys.path[:] = BEFORE  # it is a program, which puts its folder first


def gpu_of(index=0, total=80 * GIB, free=None, used=0, **more):
    free = total if free is None else free
    return GpuInfo(f"GPU-{index}", "A100", index, f"0{index}", total, free, used, **more)


def shows(monkeypatch, *gpus):
    """Have the check read an inventory of these."""
    monkeypatch.setattr(gpu_check, "read_inventory", lambda processes=True: Inventory(gpus))


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    return gpu_check.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without CUDA does")
def test_a_missing_gpu_is_reported_in_one_line(monkeypatch, capsys):
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_marked_differences_decide_the_exit_code(h200, monkeypatch, capsys, tmp_path):
    """Marked is what differs, and what was not seen."""
    checks = {
        "nvml": [gpu_check.equal("problem", None, None), gpu_check.figure("name", "H200")],
        "step": [gpu_check.below("gradients differ by", 1e-5, 0.5)],
        "sticky": [gpu_check.not_checked("fault", "no fault | happened")],
    }
    ways = []

    def run_probe(name, seconds, *, expandable):
        ways.append((name, expandable))
        return checks[name]

    monkeypatch.setattr(gpu_check, "run_probe", run_probe)
    monkeypatch.setattr(gpu_check, "EVIDENCE", tmp_path)
    assert run(monkeypatch, "nvml") == 0
    assert "all as expected" in capsys.readouterr().out
    assert run(monkeypatch, "nvml", "sticky") == 3
    assert run(monkeypatch, "sticky", "--minutes", "0") == 3, "no time was left"
    capsys.readouterr()
    ways.clear()
    assert run(monkeypatch, "nvml", "sticky", "step", "--name", "h200") == 1
    assert ways == [("nvml", True), ("sticky", True), ("step", True), ("step", False)]
    out = capsys.readouterr().out
    steps = [line for line in out.splitlines() if line.startswith("step")]
    assert [line.split()[-1] for line in steps] == ["DIFFERS", "DIFFERS"]
    assert "2 differ, 1 not checked\n" in out
    page = (tmp_path / "h200.md").read_text()
    assert page.startswith("# NVIDIA H200\n\nFor ")
    assert "| sticky | fault |  | no fault \\| happened | not checked |" in page
    assert "| nvml | name |  | H200 | figure |" in page


def test_gpus_on_which_others_compute_are_left_alone(monkeypatch, capsys):
    others, ours = (gpu_of(n, processes=(GpuProcess(p),)) for n, p in enumerate([9, os.getpid()]))
    shows(monkeypatch, others, ours)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpu_check.choose_gpu() is None, "its own process does not count as another user's"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    shows(monkeypatch, others)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert run(monkeypatch) == 3
    assert "no GPU is idle: GPU 0 (A100, GPU-0…): " in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without CUDA does")
def test_a_failed_probe_keeps_its_observations(monkeypatch):
    checks = gpu_check.run_probe("guard", 60)
    seen = [check.what for check in checks[:2]]
    assert seen == ["CUDA started by importing torch", "… by device_count()"]
    assert all(check.passed for check in checks[:2])
    assert checks[-1].what == "ends"
    assert not checks[-1].passed


def test_a_probe_that_takes_too_long_is_ended():
    [check] = gpu_check.run_probe("nvml", 0)
    assert check.seen.startswith("still running")
    assert not check.passed


def test_unknown_probes_and_missing_nvml_are_explained(monkeypatch, capsys):
    """An unknown probe is refused."""
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "nothing")
    assert "no probe 'nothing'" in capsys.readouterr().err
    empty = Inventory(problem="libnvidia-ml.so.1 was not found")
    monkeypatch.setattr(gpu_check, "read_inventory", lambda processes: empty)
    with pytest.raises(RuntimeError, match=r"libnvidia-ml\.so\.1"):
        gpu_check.gpu()


def test_the_masks_gpu_is_the_one_measured(monkeypatch):
    shows(monkeypatch, gpu_of(0), gpu_of(1))
    for mask, index in (("1", 1), ("GPU-0", 0), ("GPU-1", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert gpu_check.gpu().index == index


@pytest.fixture
def h200(monkeypatch):
    """A GPU of a container: it lists no processes. What stands in for it holds a thousandth."""
    gpu = GpuInfo("GPU-0000", "NVIDIA H200", 0, "00", 139 * GIB, 139 * GIB, 0, processes=())
    shows(monkeypatch, gpu)
    # the check itself writes it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu.uuid)
    monkeypatch.setattr(gpu_check, "GIB", MIB)
    monkeypatch.setattr(gpu_check, "SHRINK", 64)
    monkeypatch.setattr(torch, "compile", lambda model, **named: model)
    with cuda_on_the_cpu() as stand_in:
        yield stand_in


@pytest.mark.parametrize(
    "probe",
    [
        *("nvml", "second", "generator", "retry", "rewind", "optimizer", "fraction", "tight"),
        *("graph", "update"),
    ],
)
def test_a_probe_passes_on_a_stand_in(h200, probe):
    """The stand-in replaces the GPU."""
    checks = list(gpu_check.PROBES[probe][0]())
    assert checks
    assert [check for check in checks if not check.passed] == []


@pytest.mark.slow
def test_a_large_model_s_step_is_repeated(h200):
    """The time that it loses is another one there, and segments are not known."""
    checks = {check.what: check for check in gpu_check.probe_large()}
    checks.pop("… time lost")
    checks.pop("segments are expandable")
    assert [check for check in checks.values() if not check.passed] == []


OTHER_STEPS = gpu_check.STEPS[1:]


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHER_STEPS)]
)
def test_every_kind_of_step_repeats_on_stand_ins(h200, kind):
    """They replace the GPU."""
    gpu_check.limit_to(4 * MIB)
    checks = list(gpu_check.step_of(kind))
    assert [check.seen for check in checks[:1]] == ["2"]
    assert [check for check in checks if not check.passed] == []


def test_saves_are_whole_and_their_memory_visible(h200, monkeypatch):
    """Nothing is pinned without a GPU, so nothing of it is counted."""
    stats = {"allocated_bytes.current": 0}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats)
    marks = [(check.what.split()[0], check.mark) for check in gpu_check.probe_saves()]
    assert marks[:4] == [("first", "ok"), ("training", "figure")] + [
        ("second", "ok"),
        ("training", "figure"),
    ]
    assert marks[4:] == [("on", "ok"), ("pinned", "DIFFERS"), ("pinned", "ok")]
    monkeypatch.setattr(gpu_check, "pinned_bytes", lambda: None)
    assert [check.mark for check in gpu_check.probe_saves()][-1] == "not checked"


@pytest.mark.slow
def test_standbys_without_a_gpu_end_the_probe(h200):
    marks = [check.mark for check in gpu_check.probe_standby()]
    assert marks == ["ok", "DIFFERS", "DIFFERS", "ok"], "CUDA starts nowhere"


def ends_with(code, output):
    """What stands in for a command that the check starts."""
    return mock.Mock(return_value=mock.Mock(returncode=code, stdout=output, stderr=""))


RUN = (gpu_check.subprocess, "run")
KERNEL = (torch.cuda, "_compile_kernel")
LISTED = GpuInfo("GPU-0000", "H200", 0, "00", GIB, GIB, 0, processes=(GpuProcess(1, None),))


@pytest.mark.parametrize(
    ("place", "stand_in", "probe", "seen"),
    [
        ((gpu_check, "limit_to"), lambda size: None, "fraction", ["DIFFERS", ...]),
        ((gpu_check, "limit_to"), lambda size: None, "optimizer", ["DIFFERS", ...]),
        # after a fault all is asked that an attempt asks
        (RUN, ends_with(0, "3.0\n"), "sticky", ["ok"] * 4),
        (KERNEL, lambda *_: lambda args: None, "sticky", ["not checked"]),
        (KERNEL, lambda *_: 1 / 0, "sticky", ["not checked"]),
        ((gpu_check.sys, "executable"), "/bin/false", "teardown", ["DIFFERS", ...]),
        (
            (gpu_check, "read_inventory"),
            lambda processes=True: Inventory((LISTED,)),
            "context",
            [..., "DIFFERS"],
        ),
        (RUN, ends_with(0, "probe of GPU 0: it continued with 1/2\n"), "doctor", ["ok", "ok"]),
        (RUN, ends_with(0, "probe of GPU 0: not probed: busy\n"), "doctor", ["ok", "not checked"]),
        (RUN, ends_with(0, "...\n16 passed, 2 skipped in 90 s\n"), "pytest", ["ok"]),
        (RUN, ends_with(1, "...\n1 failed, 15 passed in 90 s\n"), "pytest", ["DIFFERS"]),
        (RUN, ends_with(0, "...\n18 skipped, 3000 deselected\n"), "pytest", ["not checked"]),
        (RUN, ends_with(5, "...\nno tests ran in 0.1 s\n"), "pytest", ["not checked"]),
        (RUN, ends_with(2, "...\n1 error in 3 s\n"), "pytest", ["DIFFERS"]),
    ],
)
def test_a_probe_marks_differences_and_gaps(h200, place, stand_in, probe, seen):
    """A gap is what was not seen."""
    with mock.patch.object(*place, stand_in):
        marks = [check.mark for check in gpu_check.PROBES[probe][0]()]
    expected = [marks[n] if mark is ... else mark for n, mark in enumerate(seen[: len(marks)])]
    assert marks[: len(expected)] == expected


def test_an_uncompiled_step_was_not_checked(h200):
    with mock.patch.object(torch, "compile", return_value=lambda x: 1 / 0):
        assert [check.mark for check in gpu_check.step_of("compile")] == ["not checked"]


def test_doctor_finds_libraries_that_the_image_lacks(h200, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/wheels")
    with mock.patch.object(*RUN, ends_with(0, "")) as started:
        list(gpu_check.probe_doctor())
    assert started.call_args.kwargs["env"]["PYTHONPATH"].endswith(":/wheels")


@pytest.mark.slow
def test_a_checked_job_has_our_launcher(h200, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    on_cpu = gpu_check.job
    monkeypatch.setattr(gpu_check, "job", lambda name, *rest, **named: on_cpu(name, "device=cpu"))
    assert [check.mark for check in gpu_check.probe_attempt()] == ["DIFFERS"] * 6, "no GPU was seen"
    assert [check.mark for check in gpu_check.probe_fault()] == ["not checked"]
    captured = list(gpu_check.probe_captured())
    assert captured[-1].mark in ("DIFFERS", "not checked"), "the CPU captures no graph"
    lost = list(gpu_check.probe_lost())
    assert [check.mark for check in lost] == ["ok"] * 3


def test_an_attempt_after_faults_keeps_its_gpu(h200, monkeypatch):
    fault = {"outcome": "device_fault", "action": "retry", "gpu_uuid": "GPU-0000", "started": 0.0}
    fault |= {"message": "illegal address", "seconds": 15.0, "failure": None}
    for uuid, passed in (("GPU-0000", True), ("GPU-1", False)):
        second = fault | {"outcome": "completed", "action": "none", "started": 20.0}
        done = {"attempts": [fault, second | {"gpu_uuid": uuid}]}
        monkeypatch.setattr(gpu_check, "job", lambda *args, done=done: done)
        assert [check.passed for check in gpu_check.probe_fault()] == [True, passed, True]


@pytest.mark.parametrize("others", [0, 5 * GIB])
def test_an_opaque_container_learns_a_contexts_size(h200, monkeypatch, others):
    """It shows no processes."""

    def read(processes):
        held = h200.allocated()
        used = others + (held and held + 480 * MIB)
        shown = dict.fromkeys(("total_bytes", "free_bytes"), 139 * GIB - used)
        gpu = GpuInfo("GPU-0000", "H200", 0, "00", used_bytes=used, processes=(), **shown)
        return Inventory((gpu,))

    monkeypatch.setattr(gpu_check, "read_inventory", read)
    monkeypatch.setattr(in_use, "read_inventory", read)
    context, off = gpu_check.probe_context()
    assert context.seen == "480 MiB"
    assert off.passed
    monkeypatch.setattr(in_use, "measure_outside_cache", lambda torch, index: {})
    assert [check.passed for check in gpu_check.probe_context()] == [True, False]


def test_doctor_stays_below_two_gib_of_gpu_memory(h200, capsys):
    """It leaves nothing on the GPU."""
    probe_here()
    assert capsys.readouterr().out == "1\n", "half of what was asked for"
    assert 0 < h200.reserved <= GIB


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["step", "buffers", "sampler", "history", "clear"])
def test_a_measuring_probe_ends_on_a_stand_in(h200, probe):
    """The stand-in replaces the GPU."""
    assert list(gpu_check.PROBES[probe][0]())


def test_tests_or_the_driver_run_every_probe():
    """A typo in a probe would waste somebody's first GPU."""
    text = Path(__file__).read_text()
    for name in gpu_check.PROBES:
        assert re.search(rf'"{name}"|probe_{name}\b', text), name


def rank_on_a_stand_in(rank, how, folder):
    """One of the check's two processes."""
    gpu_check.GIB, gpu_check.SHRINK = MIB, 64
    with cuda_on_the_cpu():
        RANK(rank, how, folder)


RANK = gpu_check.run_rank


@pytest.mark.slow
def test_two_ranks_have_one_steps_gradients(monkeypatch):
    """They run on a stand-in for the GPU."""
    monkeypatch.setattr(gpu_check, "run_rank", rank_on_a_stand_in)
    checks = list(gpu_check.probe_ranks())
    assert len(checks) == 12, checks
    assert all(check.passed for check in checks if "gradients" in check.what)


@pytest.mark.slow
def test_a_shared_tensor_works_or_is_refused(h200, monkeypatch):
    """In another process; its segments are the reason for refusing."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert [check.seen for check in gpu_check.probe_shared()] == ["is shared"]
    refusal = RuntimeError("pidfd_getfd: Operation not permitted")
    monkeypatch.setattr(torch, "ones", mock.Mock(side_effect=refusal))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(RuntimeError, match="pidfd"):
        list(gpu_check.probe_shared())


def test_a_killed_process_s_memory_is_waited_for(h200, monkeypatch):
    @contextlib.contextmanager
    def holding(gib, **environ):
        assert environ["PYTORCH_CUDA_ALLOC_CONF"].startswith("expandable_segments:")
        yield True

    monkeypatch.setattr(gpu_check, "holding", holding)
    assert [check.passed for check in gpu_check.probe_teardown()] == [True] * 4


def test_another_process_holds_memory_until_the_end(monkeypatch, tmp_path):
    """It holds the memory until the end of the block."""
    stand_in = tmp_path / "torch.py"
    stand_in.write_text(
        "uint8 = 0\ndef empty(*sizes, dtype, device): ...\n"
        "class cuda:\n    synchronize = staticmethod(lambda: None)\n"
    )
    with gpu_check.holding(3, PYTHONPATH=str(tmp_path)) as is_held:
        assert is_held


@pytest.mark.slow
def test_a_job_crowded_out_waits_for_room(h200, monkeypatch, cuda_machine_with):
    total = 139 * 1024
    machine = cuda_machine_with(Gpu(uuid="GPU-0000", total_mib=total, free_mib=total))
    for name, value in machine.environ.items():
        monkeypatch.setenv(name, value)

    @contextlib.contextmanager
    def holding(gib):
        assert gib > 100
        machine.update(0, free_mib=100)
        yield True
        machine.update(0, free_mib=total)

    start = gpu_check.start_job
    support = Path(failing_trainers.__file__).parent
    monkeypatch.setenv("PYTHONPATH", str(support))

    def start_job(folder, trainer, *rest, **named):
        assert trainer == "fills_eight_gib"
        rest = (*rest, "trainer._target_=failing_trainers.is_crowded_out")
        return start(folder, trainer, *rest, **named)

    monkeypatch.setattr(gpu_check, "GIB", GIB)
    monkeypatch.setattr(gpu_check, "holding", holding)
    monkeypatch.setattr(gpu_check, "start_job", start_job)
    checks = list(gpu_check.probe_crowded())
    assert [(check.what, check.seen) for check in checks if not check.passed] == []


@pytest.mark.parametrize(
    ("robust", "marks"),
    [(0.1, ["figure", "ok", "figure"]), (0.2, ["figure", "DIFFERS", "figure"]), (0, ["DIFFERS"])],
)
def test_a_step_is_timed_with_and_without_launcher(monkeypatch, robust, marks):
    monkeypatch.setattr(gpu_check, "TIMED", ("resnet50",))

    def start_job(folder, trainer, device, *, script):
        is_plain = script == "train.py"
        assert is_plain == (os.environ["TIMED_HOW"] == "plain")
        assert device == ("device=cuda:0" if is_plain else "device=auto")
        if seconds := 0.1 if is_plain else robust:
            Path(os.environ["TIMED_FILE"]).write_text(str(seconds))
        return mock.Mock(communicate=lambda: ("", "no such model"))

    monkeypatch.setattr(gpu_check, "start_job", start_job)
    assert [check.mark for check in gpu_check.probe_speed()] == marks


def test_the_checks_trainers_run_on_stand_ins(h200, monkeypatch, tmp_path):
    """They replace the GPU."""
    trainers = gpu_check.gpu_check_trainers
    for name in ("ready", "go", "timed"):
        monkeypatch.setenv(f"{name.upper()}_FILE", str(tmp_path / name))
    monkeypatch.setenv("TIMED_SMALL", "1")
    monkeypatch.setenv("TIMED_MODEL", "resnet10t")
    monkeypatch.setattr(trainers, "GIB", MIB)
    segments = [{"is_expandable": True, "segment_pool_id": (0, 0)}]
    (tmp_path / "go").touch()
    run = mock.Mock(attempt=1, backward=gpu_check.MicroBatcher(64).backward)
    cfg = mock.Mock(**{"device": "cuda:0", "training.batch_size": 64})
    assert trainers.fills_eight_gib(cfg, run) == 32
    assert (tmp_path / "ready").exists()
    for how in ("plain", "fused"):
        monkeypatch.setenv("TIMED_HOW", how)
        assert trainers.is_timed(cfg, run) == float((tmp_path / "timed").read_text()), how
    assert run.step.call_count == 12, "the plain loop has nothing of ours"
    with mock.patch.object(torch.cuda, "memory_snapshot", return_value=segments):
        h200.fraction = 0.9499999
        seen = trainers.sees(cfg, run)
    assert (seen["fraction"], seen["expandable"], seen["count"]) == (0.95, True, 1)
    with pytest.raises(RuntimeError, match="illegal"):
        trainers.faults_once(cfg, run)


@pytest.mark.slow
def test_a_job_leaves_after_its_time_slice(h200, monkeypatch, cuda_machine_with):
    """Its memory is back when the simulated NVML says so."""
    if os.geteuid() != 0:
        pytest.skip("only root can show it another user's job")
    total = 139 * 1024
    machine = cuda_machine_with(Gpu(uuid="GPU-0000", total_mib=total, free_mib=total))
    for name, value in machine.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu_check, "GIB", 0)
    checks = list(gpu_check.probe_slices())
    assert [(check.what, check.seen) for check in checks if not check.passed] == []
    assert len(checks) == 4


def test_the_check_of_samples_passes_a_step(monkeypatch):
    """The sampler calls it for each sample."""
    sampler = mock.create_autospec(Sampler)
    monkeypatch.setattr(gpu_check, "Sampler", sampler)
    monkeypatch.setattr(gpu_check, "milliseconds", lambda work, repeats: 1.0)
    monkeypatch.setattr(torch, "randn", mock.Mock())
    assert len(list(gpu_check.probe_sampler())) == 1
    call = sampler.call_args
    given = inspect.signature(Sampler).bind(*call.args, **call.kwargs)
    assert callable(given.arguments["read_step"])
