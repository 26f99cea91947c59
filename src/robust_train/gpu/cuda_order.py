"""Reads the order in which CUDA numbers this machine's GPUs, from CUDA's driver.

NVML numbers GPUs by PCI address, and CUDA by default by undocumented rules. The launcher and
``robust-train doctor`` need CUDA's order, but must not start CUDA themselves. So :func:`cuda_order`
runs this file as a script in a short-lived process, where robust_train cannot be imported. For that
reason the top of the file imports only the standard library. The other public functions read the
order in the calling process, if CUDA runs there already.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import uuid
from collections.abc import Mapping

_TIMEOUT_SECONDS = 60
_CUDA_ERROR_NOT_INITIALIZED = 3


class CudaOrderError(RuntimeError):
    """CUDA's driver did not report its order. The message has the reason."""


def cuda_order(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of all GPUs in CUDA's order, without ``GPU-`` or ``MIG-``.

    A short-lived process starts CUDA's driver. The result for each value of ``CUDA_DEVICE_ORDER``
    in ``environ`` is cached.

    Raises:
        CudaOrderError: the driver is missing or reports an error.
    """
    answer = _ask_fresh_process(environ.get("CUDA_DEVICE_ORDER"))
    if isinstance(answer, str):
        raise CudaOrderError(answer)
    return answer


@functools.lru_cache(maxsize=8)
def _ask_fresh_process(device_order: str | None) -> tuple[str, ...] | str:
    """Return the UUIDs, or the reason why they are unknown."""
    hidden = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    if device_order is not None:
        environ["CUDA_DEVICE_ORDER"] = device_order
    from robust_train.gpu.bounded import NoAnswerError, run_command

    # With -I, the script's folder does not come before the standard library.
    command = [sys.executable, "-I", "-S", __file__]
    try:
        done = run_command(command, _TIMEOUT_SECONDS, environ)
    except (OSError, NoAnswerError) as error:
        return str(error)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {done.returncode}"
    return tuple(done.stdout.decode().split())


def started_driver() -> ctypes.CDLL | None:
    """Return CUDA's driver if it is initialised in this process, otherwise None.

    ``torch.cuda.is_initialized()`` does not show this, because ``torch.cuda.is_available()`` may
    initialise the driver too.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    code = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return None if code == _CUDA_ERROR_NOT_INITIALIZED else driver


def order_in_this_process() -> tuple[str, ...] | None:
    """Return the UUIDs of the GPUs that CUDA shows in this process, in its order and without
    ``GPU-`` or ``MIG-``. None if CUDA has not started."""
    driver = started_driver()
    if driver is None:
        return None
    try:
        return _list_uuids(driver)
    except CudaOrderError:
        return None


def _list_uuids(driver: ctypes.CDLL) -> tuple[str, ...]:
    count = ctypes.c_int()
    _check("cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    uuids = []
    for ordinal in range(count.value):
        device = ctypes.c_int()
        _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
        raw = (ctypes.c_ubyte * 16)()
        # Version 1 returns the UUID of a MIG slice's parent.
        _check("cuDeviceGetUuid_v2", driver.cuDeviceGetUuid_v2(raw, device))
        uuids.append(str(uuid.UUID(bytes=bytes(raw))))
    return tuple(uuids)


def _check(call: str, code: int) -> None:
    if code != 0:
        raise CudaOrderError(f"{call} failed with CUDA error {code}")


def _main() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        _check("cuInit", driver.cuInit(0))
        print(" ".join(_list_uuids(driver)))
    except (OSError, AttributeError, CudaOrderError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
