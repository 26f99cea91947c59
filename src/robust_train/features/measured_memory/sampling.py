"""Reads from NVML what a job's processes hold on a GPU, in the launcher."""

from __future__ import annotations

from collections.abc import Sequence

from robust_train.features.measured_memory.measurement import Measurement
from robust_train.features.measured_memory.model import Sample
from robust_train.gpu.processes import has_library, has_this_number_here, sees_host_pids
from robust_train.host.linux import job_mark
from robust_train.host.reaper import mark_of
from robust_train.model.gpu import GpuInfo
from robust_train.queue.host_queue import HostQueue
from robust_train.queue.queue_dir import QueueError

# Parts of the paths of JAX's and TensorFlow's libraries.
_LIBRARIES_THAT_TAKE_ALL = ("xla_", "tensorflow")


def read_sample(gpu: GpuInfo, queue: HostQueue, current: Measurement) -> Sample:
    """Return NVML's figures of a GPU, with the processes of the job and of others.

    Args:
        gpu: the GPU as NVML has just shown it.
        queue: the job's place among the host's jobs.
        current: the measurement of the attempt. A GPU with another job is added to its ``shared``.
    """
    processes = gpu.processes or ()
    our_pids = find_pids(gpu, queue.job_id)
    ours = tuple(row.used_bytes for row in processes if row.pid in our_pids)
    shows_sizes = bool(ours) and None not in ours
    # The other jobs matter only if their memory cannot be separated from ours. They are read from
    # files.
    if not shows_sizes and gpu.uuid not in current.shared and _has_other_jobs(queue, gpu.uuid):
        current.shared.add(gpu.uuid)
    return Sample(
        used_bytes=gpu.used_bytes,
        before_bytes=current.used_before.get(gpu.uuid, gpu.used_bytes),
        ours=ours,
        others=sum(row.computes for row in processes if row.pid not in our_pids),
        is_listed=gpu.processes is not None and sees_host_pids(),
        is_alone=gpu.uuid not in current.shared,
    )


def find_pids(gpu: GpuInfo, job_id: str) -> set[int]:
    """Return the processes of a job that NVML lists on a GPU."""
    mark = job_mark(job_id)
    return {
        row.pid
        for row in gpu.processes or ()
        if mark_of(row.pid) == mark and has_this_number_here(row.pid)
    }


def uses_torch(gpus: Sequence[GpuInfo], job_id: str) -> bool:
    """Return whether torch surely allocates the memory of a job's processes on these GPUs.

    Torch takes only what is used, also in a script that reports nothing. The programs of JAX may
    load torch too, for their data.
    """
    pids = {pid for gpu in gpus for pid in find_pids(gpu, job_id)}
    if not any(has_library(pid, "libc10_cuda") for pid in pids):
        return False
    return not any(has_library(pid, name) for pid in pids for name in _LIBRARIES_THAT_TAKE_ALL)


def _has_other_jobs(queue: HostQueue, uuid: str) -> bool:
    """Return whether another job of the queue is on a GPU. True if that is unknown."""
    try:
        return any(uuid in job.gpus for job in queue.others())
    except QueueError:
        return True
