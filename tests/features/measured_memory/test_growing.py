"""Reservations that follow what is held never promise more than a GPU has."""

from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.gpu.visible import visible_gpus
from robust_train.model.gpu import GpuInfo, Inventory
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.registry import QueuedJob
from robust_train.readable import MIB

TOTAL = 40000
UUID = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
MOVES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20000)), max_size=12)


@settings(max_examples=25, deadline=None)
@given(moves=MOVES)
def test_growing_jobs_share_what_a_gpu_has(tmp_path_factory, moves):
    """Each holds what it likes within its reservation, and asks for the reservation it likes."""
    directory = tmp_path_factory.mktemp("queue")
    held = [0, 0, 0]

    def read(processes):
        used = sum(held) * MIB
        gpu = GpuInfo(UUID, "A100", 0, UUID, TOTAL * MIB, TOTAL * MIB - used, used)
        return visible_gpus(Inventory((gpu,)), {})

    queues = []
    for number in range(3):
        job = QueuedJob(name=str(number), jobs_per_device=3)
        queue = HostQueue(directory, read, job)
        request = GpuRequest(4000 * MIB)
        queue.join(request)
        queue.requeue(request, (UUID,))
        assert queue.announce([UUID], 4000 * MIB)
        queues.append(queue)
    reserved = [4000] * 3
    for number, need in moves:
        got = queues[number].follow([held[number] * MIB], need * MIB)
        reserved[number] = got // MIB
        assert reserved[number] >= held[number]
        assert sum(reserved) <= TOTAL, (number, need)
        held[number] = min(need, reserved[number])
    for queue in queues:
        queue.release()


def test_a_job_without_a_reservation_follows_nothing():
    assert HostQueue(None, lambda processes: None).follow([1], 2) is None
