"""Several GPUs for one job, as the launcher has them: on simulated machines."""

from simulated_nvml import Gpu

PROGRAM = """
import json, logging, os, sys, time
from pathlib import Path
from robust_train.config.composition import complete
from robust_train.model.errors import ConfigError, NoDevice
from robust_train.model.events import MemoryReported
from robust_train.queue.devices import Devices
from robust_train.queue.queue_dir import directory_for
from robust_train.queue.registry import Registry
from robust_train.config.checks import checked
from robust_train.model.failure import Evidence, Failure, FailureKind
from robust_train.model.attempt import Attempt
from robust_train.model.spec import AttemptSpec, Room

def devices(environ={}, **keys):
    cfg = complete({"num_gpus": 2, **keys})
    folder = Path("run")
    return Devices(checked(cfg), "job", {**os.environ, **environ}, folder, time.sleep)

def indexes(group):
    return [gpu.index for gpu in group]

def answer(*arguments, fewer=(), **keys):
    job = devices(*arguments, **keys)
    try:
        return indexes(job.acquire(fewer))
    except (ConfigError, NoDevice) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        job.queue.release()

def records():
    registry = Registry(directory_for(None, os.environ))
    try:
        return registry.jobs()
    finally:
        registry.close()

"""


def test_a_job_takes_exchanges_and_gives_back_its_gpus_together(machine_with):
    gpus = [Gpu(), Gpu(total_mib=16000, name="V100"), Gpu(free_mib=30000), Gpu(free_mib=20000)]
    machine = machine_with(*gpus)
    told = machine.python(
        PROGRAM
        + """
seen = {}
job = devices()
group = job.acquire()
seen["acquired"] = indexes(group)
for event in ({"reserved": 10}, {"reserved": 9 * 1024**3, "rank": 1}, {"reserved": 1, "rank": 5}):
    job.on_event(MemoryReported("here", **event))
(record,) = records()
seen["recorded"] = record.gpus == tuple(gpu.uuid for gpu in group)
seen["taken"] = record.taken_bytes
seen["others"] = answer(num_gpus=3, wait_for_gpu=False, allow_cpu_fallback=False)
hardware = Evidence(clue="hardware")
ecc = Failure(FailureKind.DEVICE_FAULT, "CUDA error: uncorrectable ECC error", hardware, rank=1)
spec = AttemptSpec(group, 8, 1, ranks=len(group))
attempt = Attempt(1, spec, failure=ecc, memory={"max_allocated": 8 * 1024**3})
job.begin(group)
seen["free_after"] = job.ended(attempt).gpu_free_after_bytes // 1024**2
registry = Registry(directory_for(None, os.environ))
seen["sick"] = [one.uuid for one in registry.exclusions()] == [group[1].uuid]
seen["state"] = records()[0].state
offers = job.offers().gpus
seen["candidates"] = indexes(offers)
exchanged = (group[0], next(gpu for gpu in offers if gpu.index == 3))
seen["took"] = job.take(exchanged)
(record,) = records()
seen["moved"] = record.gpus == tuple(gpu.uuid for gpu in exchanged)
seen["claim"] = record.reserved_bytes == int(9 * 1024**3 * 1.1) + 512 * 1024**2
own = tuple(gpu.uuid for gpu in exchanged)
seen["room"] = sorted(indexes(job.wait_for_room(Room(own, 15000 * 1024**2))))
seen["to_cpu"] = job.take(())
seen["left"] = records()
print(json.dumps(seen))
"""
    )
    others = told.pop("others")
    assert told == {
        "acquired": [0, 2],  # the small one is of another model
        "recorded": True,
        "taken": [10, 9 * 1024**3],
        "free_after": 30000,
        "sick": True,
        "state": "draining",
        "candidates": [0, 3, 1],
        "took": True,
        "moved": True,
        "claim": True,
        "room": [0, 3],
        "to_cpu": True,
        "left": [],
    }
    assert others.startswith("NoDevice: no 3 GPUs were available now: 2 of 3 GPUs available; GPU")


def test_a_group_is_bounded_by_masks_and_allocations_and_refused_in_one_line(machine_with):
    machine = machine_with(Gpu(), Gpu(), Gpu(), Gpu(total_mib=2000, recovery=1))
    told = machine.python(
        PROGRAM
        + """
mask = {"CUDA_VISIBLE_DEVICES": "2,1"}
slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1,2"}
free = {"gpu_queue": False}
print(json.dumps({
    "mask": sorted(answer(mask)),
    "mask_without_queue": sorted(answer(mask, **free)),
    "slurm": sorted(answer(slurm)),
    "too_many": answer(num_gpus=4),
    "too_many_without_queue": answer(num_gpus=4, **free),
    "too_many_for_the_mask": answer(mask, num_gpus=3),
    "fewer": sorted(answer(num_gpus=4, fewer=(3, 2))),
    "too_many_still": answer(mask, num_gpus=4, fewer=(3,)),
    "one_gpu": answer(auto_device=False, device="cuda:1"),
    "any": sorted(answer(auto_device=False, device="auto", num_gpus=3)),
    "the_cpu": answer(auto_device=False, device="cpu"),
}))
"""
    )
    assert told["mask"] == told["mask_without_queue"] == told["slurm"] == [1, 2]
    assert told["any"] == told["fewer"] == [0, 1, 2]
    assert told["too_many_still"].startswith("ConfigError: num_gpus=3: only 2 GPUs here could")
    assert told["the_cpu"] == []
    too_many = (
        "ConfigError: num_gpus=4: only 3 GPUs here could ever give 4000 MiB; ask for at most "
        "num_gpus=3, or less min_gpu_memory_mb"
    )
    assert told["too_many"] == told["too_many_without_queue"] == too_many
    assert told["too_many_for_the_mask"] == told["too_many_still"]
    assert told["one_gpu"].startswith(
        "ConfigError: num_gpus=2 cannot be combined with device=cuda:1"
    )
    assert "CUDA_VISIBLE_DEVICES" in told["one_gpu"]


def test_after_waiting_in_vain_a_job_takes_fewer_gpus(machine_with):
    machine = machine_with(Gpu(), Gpu(), Gpu(free_mib=100))
    told = machine.python(
        PROGRAM
        + """
short = {"gpu_wait_timeout_minutes": 0.005, "allow_cpu_fallback": False}
print(json.dumps({
    "never_fewer": answer(num_gpus=3, **short),
    "fewer": sorted(answer(num_gpus=3, fewer=(2, 1), **short)),
    "without_queue": sorted(answer(num_gpus=3, fewer=(2, 1), gpu_queue=False, **short)),
}))
"""
    )
    assert told["never_fewer"].startswith("NoDevice: no 3 GPUs were available within")
    assert told["fewer"] == told["without_queue"] == [0, 1]
