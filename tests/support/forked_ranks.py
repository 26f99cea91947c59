"""Work done by several forks of one interpreter, which has imported what they need."""

import json
import os
import traceback
from collections.abc import Callable


def of_forks(ranks: int, work: Callable[[int], object]) -> list[object]:
    """What ``work(rank)`` returns in a fork for each rank; None where it fails.

    Threads are set as the launcher does in a rank: the first use of torch's pool after a fork is
    not safe in two threads at once ("Invalid thread pool!").
    """
    import torch

    pipes = []
    for rank in range(ranks):
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            try:
                torch.set_num_threads(torch.get_num_threads())
                with os.fdopen(write_end, "w") as file:
                    json.dump(work(rank), file)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(write_end)
        pipes.append(read_end)
    return [json.loads(os.fdopen(pipe).read() or "null") for pipe in pipes]


def of_ranks(ranks: int, work: Callable[[int], object]) -> list[object]:
    """The same, with the environment that the launcher gives to ranks."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "robust_train",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }

    def be(rank: int) -> object:
        os.environ |= common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return work(rank)

    return of_forks(ranks, be)


def outcomes(parts: dict[Callable[..., object], tuple[object, ...]]) -> dict[str, str]:
    """What each part, a function with assertions, fails with where it gets these arguments."""
    tracebacks = {}
    for part, arguments in parts.items():
        tracebacks[part.__name__] = ""
        try:
            part(*arguments)
        except Exception:
            tracebacks[part.__name__] = traceback.format_exc()
    return tracebacks
