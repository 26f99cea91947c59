"""Fixtures that build the simulated libraries once per session and furnish machines with them."""

import os
import shutil

import pytest

from simulated_nvml import Machine, build_libcuda, build_nvml


@pytest.fixture(scope="session")
def nvml_libraries(tmp_path_factory):
    """Folder with the simulated ``libnvidia-ml.so.1`` alone."""
    if shutil.which("cc") is None:
        refuse = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        refuse("no C compiler (cc): the simulated NVML cannot be built")
    return build_nvml(tmp_path_factory.mktemp("nvml")).parent


@pytest.fixture(scope="session")
def gpu_libraries(tmp_path_factory, nvml_libraries):
    """Folder with the simulated ``libnvidia-ml.so.1`` and ``libcuda.so.1``."""
    folder = tmp_path_factory.mktemp("nvml_and_cuda")
    shutil.copy(nvml_libraries / "libnvidia-ml.so.1", folder)
    return build_libcuda(folder).parent


@pytest.fixture
def machine_with(tmp_path, nvml_libraries):
    """Makes a machine with the GPUs given, with NVML but without CUDA's library."""
    return lambda *gpus, **options: Machine(tmp_path, nvml_libraries, gpus, **options)


@pytest.fixture
def cuda_machine_with(tmp_path, gpu_libraries):
    """Makes a machine with the GPUs given, with NVML and CUDA's library."""
    return lambda *gpus, **options: Machine(tmp_path, gpu_libraries, gpus, **options)
