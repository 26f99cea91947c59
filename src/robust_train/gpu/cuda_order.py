"""The order in which CUDA numbers this machine's GPUs, as CUDA's driver itself reports it.

NVML numbers GPUs by PCI address, CUDA by default by undocumented rules. The launcher and
``robust-train doctor`` need the order but must not start CUDA themselves. So :func:`cuda_order`
runs this file as a script in a short-lived process without robust_train on its path, and the top of
the file imports only the standard library. The other functions look at the calling process.
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
    """Return UUIDs (without ``GPU-`` or ``MIG-``) in CUDA's order with no mask set. A short-lived
    process starts CUDA's driver, once for each ``CUDA_DEVICE_ORDER`` in ``environ``. Raises
    CudaOrderError: the driver is missing or refuses."""
    answer = _ask_fresh_process(environ.get("CUDA_DEVICE_ORDER"))
    if isinstance(answer, str):
        raise CudaOrderError(answer)
    return answer


@functools.lru_cache(maxsize=8)
def _ask_fresh_process(device_order: str | None) -> tuple[str, ...] | str:
    hidden = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    if device_order is not None:
        environ["CUDA_DEVICE_ORDER"] = device_order
    from robust_train.gpu.bounded import NoAnswerError, run_command

    # isolated (-I): the script's folder must not come before the standard library
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
    """Return CUDA's driver if something in this process has initialised it. Does not initialise it.
    ``torch.cuda.is_initialized()`` is not enough: ``is_available()`` may start the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    code = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return None if code == _CUDA_ERROR_NOT_INITIALIZED else driver


def order_in_this_process() -> tuple[str, ...] | None:
    """Return UUIDs (without ``GPU-`` or ``MIG-``) by CUDA ordinal, or None if CUDA has not
    started."""
    driver = started_driver()
    try:
        return None if driver is None else _enumerate(driver)
    except CudaOrderError:
        return None


def _enumerate(driver: ctypes.CDLL) -> tuple[str, ...]:
    count = ctypes.c_int()
    _check("cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    uuids = []
    for ordinal in range(count.value):
        device = ctypes.c_int()
        _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
        raw = (ctypes.c_ubyte * 16)()
        # version 1 has a slice's parent's UUID
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
        print(" ".join(_enumerate(driver)))
    except (OSError, AttributeError, CudaOrderError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
