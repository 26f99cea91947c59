"""Several GPUs for one job, as the launcher has them: on simulated machines."""

from simulated_nvml import Gpu

PROGRAM = """
import os, time
from pathlib import Path
from robust_train.config.composition import complete
from robust_train.model.errors import ConfigError, NoDeviceError
from robust_train.model.events import MemoryReported
from robust_train.queue.devices import Devices
from robust_train.queue.queue_dir import directory_for
from robust_train.queue.registry import Registry
from robust_train.config.checks import checked
from robust_train.model.failure import Evidence, Failure, FailureKind
from robust_train.model.attempt import Attempt
from robust_train.model.spec import AttemptSpec, Room

MIB = 1024**2

def devices(environ={}, **keys):
    cfg = complete({"num_gpus": 2, **keys})
    return Devices(checked(cfg), "job", {**os.environ, **environ}, Path("run"), time.sleep)

def indexes(group):
    return [gpu.index for gpu in group]

def answer(*arguments, fewer=(), **keys):
    job = devices(*arguments, **keys)
    try:
        return sorted(indexes(job.acquire(fewer)))
    except (ConfigError, NoDeviceError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        job.queue.release()

registry = Registry(directory_for(None, os.environ))
"""


def holds_on(machine, program):
    """Run the program, whose assertions hold on this machine."""
    assert machine.python(f"{PROGRAM}{program}\nprint('true')") is True


def test_a_jobs_gpus_are_taken_and_returned_together(machine_with):
    """They are exchanged together as well."""
    gpus = [Gpu(), Gpu(total_mib=16000, name="V100"), Gpu(free_mib=30000), Gpu(free_mib=20000)]
    holds_on(
        machine_with(*gpus),
        """
job = devices()
group = job.acquire()
assert indexes(group) == [0, 2], "the small one is of another model"
for rank, reserved in ((None, 10), (1, 9 * 1024 * MIB), (5, 1)):
    job.on_event(MemoryReported("here", reserved=reserved, rank=rank))
(record,) = registry.jobs()
assert record.gpus == tuple(gpu.uuid for gpu in group)
assert list(record.taken_bytes) == [10, 9 * 1024 * MIB]
others = answer(num_gpus=3, wait_for_gpu=False, allow_cpu_fallback=False)
assert others.startswith("NoDeviceError: no 3 GPUs were available now: 2 of 3 GPUs available; GPU")
hardware = Evidence(clue="hardware")
ecc = Failure(FailureKind.DEVICE_FAULT, "CUDA error: uncorrectable ECC error", hardware, rank=1)
spec = AttemptSpec(group, 8, 1, ranks=len(group))
attempt = Attempt(1, spec, failure=ecc, memory={"max_allocated": 8 * 1024 * MIB})
job.note_free_memory(group)
assert job.record_end(attempt).after // MIB == 30000
assert [exclusion.uuid for exclusion in registry.exclusions()] == [group[1].uuid]
assert registry.jobs()[0].state == "draining"
offers = job.offers().gpus
assert indexes(offers) == [0, 3, 1]
exchanged = (group[0], offers[1])
assert job.take(exchanged)
(record,) = registry.jobs()
assert record.gpus == tuple(gpu.uuid for gpu in exchanged)
assert record.reserved_bytes == int(9 * 1024 * MIB * 1.1) + 512 * MIB
room = Room(record.gpus, 15000 * MIB)
assert sorted(indexes(job.wait_for_room(room, for_ever=False))) == [0, 3]
assert job.take(())
assert list(registry.jobs()) == []
""",
    )


def test_a_job_that_filled_its_gpu_can_move(machine_with):
    """It is estimated to need more than any GPU has, and needs no more than it had."""
    holds_on(
        machine_with(*[Gpu(total_mib=80000, free_mib=free) for free in (79500, 79400)]),
        """
job = devices(num_gpus=1)
group = job.acquire()
fault = Failure(FailureKind.DEVICE_FAULT, "CUDA error: an illegal memory access")
memory = {"max_allocated": 75000 * MIB}
attempt = Attempt(1, AttemptSpec(group, 8, 1), failure=fault, memory=memory)
job.note_free_memory(group)
job.record_end(attempt)
assert job.take((job.offers().gpus[1],)), "the other GPU is free"
room = job.release_for_others(1)
assert room.free_bytes == 79500 * MIB
assert indexes(job.wait_for_room(room, for_ever=True)) == [0]
""",
    )


def test_masks_and_allocations_bound_a_group(machine_with):
    """A larger group is refused in one line."""
    holds_on(
        machine_with(Gpu(), Gpu(), Gpu(), Gpu(total_mib=2000, recovery=1)),
        """
mask = {"CUDA_VISIBLE_DEVICES": "2,1"}
slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1,2"}
free = {"gpu_queue": False}
assert answer(mask) == answer(mask, **free) == answer(slurm) == [1, 2]
assert answer(auto_device=False, device="auto", num_gpus=3) == [0, 1, 2]
assert answer(num_gpus=4, fewer=(3, 2)) == [0, 1, 2]
assert answer(auto_device=False, device="cpu") == []
assert answer(num_gpus=4) == answer(num_gpus=4, **free) == (
    "ConfigError: num_gpus=4: only 3 GPUs here could ever give 4000 MiB; ask for at most "
    "num_gpus=3, or less min_gpu_memory_mb"
)
too_many = answer(mask, num_gpus=3)
assert too_many == answer(mask, num_gpus=4, fewer=(3,))
assert too_many.startswith("ConfigError: num_gpus=3: only 2 GPUs here could")
one_gpu = answer(auto_device=False, device="cuda:1")
assert one_gpu.startswith("ConfigError: num_gpus=2 cannot be combined with device=cuda:1")
assert "CUDA_VISIBLE_DEVICES" in one_gpu
""",
    )


def test_waiting_in_vain_leads_to_fewer_gpus(machine_with):
    holds_on(
        machine_with(Gpu(), Gpu(), Gpu(free_mib=100)),
        """
short = {"gpu_wait_timeout_minutes": 0.005, "allow_cpu_fallback": False, "num_gpus": 3}
assert answer(**short).startswith("NoDeviceError: no 3 GPUs were available within")
assert answer(fewer=(2, 1), **short) == [0, 1]
assert answer(fewer=(2, 1), gpu_queue=False, **short) == [0, 1]
""",
    )
