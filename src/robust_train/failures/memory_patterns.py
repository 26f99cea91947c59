"""Memory that ran out: the host's before the device's, whose library it often names too."""

from __future__ import annotations

import re

from robust_train.failures.patterns import Match, Pattern, types_named, words
from robust_train.values import Clue, FailureKind

# The kernel's log, cgroup managers and schedulers on a process that the OOM killer took.
KERNEL_OOM = re.compile(
    r"Out of memory: Kill(?:ed)? process|Memory cgroup out of memory|invoked oom-killer"
    r"|oom_reaper: |oom-kill:constraint|Detected \d+ oom[-_ ]kill event|some of (?:your|the step) "
    r"(?:processes|tasks) (?:may )?have been (?:killed by the cgroup out-of-memory handler"
    r"|OOM Killed)"
    r"|\bOOMKilled\b|\bOUT_OF_MEMORY\b(?=\)|$|[ +])|srun: error: .*: Out Of Memory"
    r"|exceeded (?:job |step )?memory limit|memory limit.{0,40}being killed|TERM_MEMLIMIT"
    r"|job killed: .{0,20}mem .{0,20}exceeded limit|systemd-oomd.{0,40}killed|killed by .{0,20}oom"
    r"|earlyoom.{0,80}sending SIG|memory usage exceed\w* .{0,60}kill",
    re.IGNORECASE,
)

_DEVICES = r"(?:CUDA|HIP|XPU|MPS|NPU|MLU|MUSA|HPU|DCU|GCU|SDAA|GPU|TPU|HBM|VRAM|PrivateUse1)"
# fmt: off
MEMORY: tuple[Pattern, ...] = (
    # --- the host's memory ---
    Pattern(Match(FailureKind.HOST_OOM, "kernel"), KERNEL_OOM),
    words("host_oom", "pinned memory",
        # CUDA's "out of memory" is for the host's pages too
        r"(?:cudaHostAlloc|cudaMallocHost|cudaHostRegister|cuMemHostAlloc|hipHostMalloc"
        r"|Caching_?Host_?Allocator\w*|device_host_allocator|pinned (?:host |GPU )?memory)"
        r".{0,200}(?:out of memory|OUT_OF_MEMORY|failed)",
        r"(?:out of memory|could not allocate|failed to allocate?).{0,120}"
        r"(?:\bpinned|pin_memory|Caching_?Host_?Allocator)",
        r"bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
        r"in pin memory thread.*CUDA (?:driver )?error: out of memory",
        r"Failed to CUDA host alloc"),  # NCCL
    words("host_oom", "torch",
        r"DefaultCPUAllocator: (?:can.t allocate|not enough) memory",
        r"not enough memory: you tried to (?:re)?allocate",
        r"posix_memalign\(.{0,80}12 vs 0",  # torch 1.1
        r"C10 Out of Memory",
        r"Could not allocate memory (?:for|to change) Tensor"),
    words("host_oom", "numpy",
        r"Unable to allocate (?:[\d.,]+ ?\w+ for an )?array with shape",
        r"Unable to allocate [\d.,]+ ?(?:bytes|[KMGTP]iB) for"),
    words("comm", "nccl",
        # ibverbs pins memory up to ulimit -l: a setting of the fabric, no lack of memory
        r"\bibv_\w+.{0,80}Cannot allocate memory"),
    Pattern(
        Match(FailureKind.HOST_OOM, "os"),
        re.compile(
            r"\[Errno 12\]|\bENOMEM\b|os error 12\b|errno[ =:]{1,2}12\b|Cannot allocate memory"
            r"|\bmmap(?:\(\))? failed"
            r"|paging file is too small|WinError (?:8|1450|1455)\b|error code: <(?:8|1450|1455)>"
            r"|Not enough memory resources are available|Insufficient system resources exist",
            re.IGNORECASE,
        ),
        errnos=frozenset({12}),
    ),
    words("host_oom", "tensorflow",
        r"OOM when allocating tensor.*(?:device:CPU|by allocator (?:mkl)?cpu)",
        r"RESOURCE[_ ]EXHAUSTED.*(?:\bT[Ff][Rr][Tt]_?C[Pp][Uu]|host memory|pinned_host|device CPU)",
        r"Allocation of \d+ exceeds \d+% of (?:free )?system memory.{0,200}(?:bad_alloc|Killed)"),
    words("host_oom", None,
        r"OUT_OF_HOST_MEMORY|HOST_ALLOCATION_FAILED",  # Level Zero, OpenCL; cuDNN 9
        r"java\.lang\.OutOfMemoryError|Java heap space|GC overhead limit exceeded",
        r"\b(?:malloc|realloc|calloc) of size \d+ failed",  # Arrow
        r"memory allocation of \d+ bytes failed",  # Rust: tokenizers, polars
        r"-4:Insufficient memory|Insufficient memory \(Failed to allocate",  # OpenCV
        r"OpenBLAS.{0,40}(?:Memory allocation still failed|malloc failed)",
        r"(?:MKL|BLACS|DFTI|ScaLAPACK).{0,60}(?:Not enough memory|memory allocation failed)",
        r"node running low on memory|killed due to memory pressure",  # Ray
        r"object store.{0,20}is full",
        r"\(state: OUT_OF_MEMORY\)",  # submitit
        r"Virtual memory exhausted",
        r"\b(?:host|system|CPU|RAM) (?:\w+ )?out of memory|out of (?:host|system|CPU) memory",
        r"\bout of RAM\b",
        r"\bC error: out of memory",  # pandas
        r"Out of Memory Error: (?:failed|could not) (?:to )?allocate"),  # DuckDB
    types_named("host_oom", "ray", "ObjectStoreFullError"),
    types_named("host_oom", "arrow", "ArrowMemoryError"),
    # --- the device's memory ---
    words("device_oom", "torch",
        # the caching allocators of all backends and versions
        rf"\b{_DEVICES}(?: backend| device)?(?: (?:has )?r[au]n)? out of (?:the )?memory",
        rf"\b{_DEVICES} memory (?:is )?(?:overflow|exhausted|full|insufficient)",
        rf"\b{_DEVICES} memory allocation (?:fail|err)",
        rf"\b(?:{_DEVICES}|device) OOM\b",
        r"would exceed allowed memory|preemptively rejected",
        r"c10::(?:\w+::)?OutOfMemoryError|torch\.(?:cuda\.)?OutOfMemoryError",
        # while writing the message of an OOM it asks NVML about the processes (pytorch#112377)
        r"NVML_SUCCESS == .{0,120}INTERNAL ASSERT FAILED at .{0,120}Allocator",
        r"Invalid buffer size: [\d.]+ [KMGT]i?B",  # MPS: above the largest buffer
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory",
        r"Allocation is out of device memory",  # XPU
        r"can ?not allocate memory block with size larger than"),  # XPU
    words("device_oom", "cublas",
        r"(?:CU|HIP)BLAS_STATUS_ALLOC_FAILED",
        r"cublas runtime error : resource allocation failed"),  # torch until 1.3
    # a handle's workspace that found no room, for which cuBLAS has no words
    words("device_oom", "cublas", r"(?:CU|HIP)BLAS_STATUS_NOT_INITIALIZED.{0,40}blas(?:Lt)?Create"),
    words("device_oom", "rocblas", r"rocblas_status_memory_error"),
    words("device_oom", "cudnn",
        r"CUDNN_STATUS_ALLOC_FAILED|DEVICE_ALLOCATION_FAILED",
        # no algorithm's workspace fits: each try that ran out of memory was dropped silently
        r"Unable to find a valid cuDNN algorithm",
        r"unable to find an engine to execute this computation",
        r"no valid convolution algorithms available in CuDNN",
        r"Failed to get convolution algorithm",
        r"(?:could not|failed to) create cudnn handle",
        # the first thing that cuDNN allocates is its handle
        r"CUDNN_STATUS_NOT_INITIALIZED",
        # not about strides: torch makes its tensors contiguous. Sizes that no algorithm takes, for
        # which accelerate and Lightning halve the batch too (pytorch#4107)
        r"CUDNN_STATUS_NOT_SUPPORTED.{0,60}non-contiguous"),
    words("device_oom", "miopen", r"miopenStatusAllocFailed"),
    words("device_oom", "cufft", r"(?:CU|HIP)FFT_ALLOC_FAILED"),
    words("device_oom", "cusolver",
        r"(?:CU|HIP)SOLVER_STATUS_ALLOC_FAILED|Failed to create cuSolverDN instance"),
    words("device_oom", "cusparse",
        r"(?:CU|HIP)SPARSE(?:LT)?_STATUS_(?:ALLOC_FAILED|INSUFFICIENT_RESOURCES)",
        r"insufficient resources when calling .?(?:cu|hip)sparse"),
    words("device_oom", "curand", r"CURAND_STATUS_ALLOCATION_FAILED"),
    words("device_oom", "triton", r"Triton Error \[(?:CUDA|HIP)\]: out of memory"),
    words("device_oom", "bitsandbytes", r"Error out of memory at line \d+ in file"),
    words("device_oom", "nccl",
        r"NCCL.{0,400}(?:Cuda|HIP) failure.{0,20}out of memory",
        r"Failed to CUDA (?:calloc|malloc)"),
    words("host_oom", "nccl", r"NCCL.{0,400}Failed to (?:malloc|calloc) \d+ bytes"),
    words("device_oom", "cuda",
        # runtime and driver, in the words of all who pass them on
        r"\b(?:cuda|hip)(?:Malloc\w*|MemAlloc\w*|MemCreate)?\b.{0,120}?out[ _]of[ _]memory",
        r"\b(?:cudaMalloc|cuMemAlloc|hipMalloc)\w*.{0,60}\bfailed\b"
        r"(?!.{0,60}(?:illegal|launch|ECC|invalid|initializ|driver|no CUDA|busy))",
        r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|cudaErrorOutOfMemory",
        r"HIP_ERROR_OutOfMemory|hipErrorOutOfMemory|hipErrorMemoryAllocation|hipError_t\(1002\)",
        r"out of memory.{0,80}(?:cuda|hip|\bGPU\b|\.cuh?\b|device_context)",
        r"(?:bad_alloc|RMM failure|rmm::|thrust::).{0,200}(?:out[ _]of[ _]memory|cudaErrorMemory)",
        r"RMM_ERROR_OUT_OF_MEMORY|Maximum pool size exceeded",
        r"failed to get memory buffer"),  # thrust
    words("device_oom", "xpu",
        r"\b(?:UR|ZE|PI)_(?:RESULT_)?ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)",
        r"CL_OUT_OF_RESOURCES|MEM_OBJECT_ALLOCATION_FAILURE",
        r"(?:ERROR_OUT_OF_DEVICE_MEMORY|ErrorOutOfDeviceMemory)\b"),  # Vulkan
    words("device_oom", "mlx",
        r"\[(?:metal::)?malloc(?:_or_wait)?\] (?:Attempting|Unable) to alloc"),
    words("device_oom", "npu", r"Memory_Allocation_Failure|\b(?:aclrt|rt)Malloc\w*.{0,60}\bfail"),
    words("device_oom", "rocm", r"HSA_STATUS_ERROR_OUT_OF_RESOURCES"),
    words("device_oom", "xla",
        r"RESOURCE[_ ]EXHAUSTED.{0,200}(?:out of memory|allocat|reserve \d|\bOOM\b|\bhbm\b)",
        r"Ran out of memory in memory space",
        r"Failed to allocate \d+ bytes for new constant"),
    words("device_oom", "tensorflow",
        r"OOM when allocating tensor",
        r"failed to alloc\w* .{0,60}from device",
        # a copy to the GPU that found no room
        r"Dst tensor is not initialized|unable to allocate output tensor",
        r"\bResource exhausted: .{0,120}(?:OOM|memory)"),
    words("device_oom", "onnxruntime",
        r"Failed to allocate memory for requested buffer of size",
        r"Available memory of \d+ is smaller than requested bytes"),
    words("device_oom", None,
        r"\bCannot allocate [\d.]+ ?\w+ memory on (?:GPU|XPU|NPU)",  # Paddle
        r"out of memory error on (?:GPU|XPU|NPU)",
        r"not enough GPU (?:video )?memory",  # DirectML
        r"(?:out of|insufficient) (?:GPU|device|video|graphics) memory|out of (?:VRAM|HBM)"
        r"|(?:insufficient|not enough) VRAM",
        r"(?:failed|unable|could not|cannot) (?:to )?allocate.{0,40}(?:GPU|device|CUDA) memory",
        r"(?:failed|unable|could not|cannot) (?:to )?alloc\w*.{0,40}\b(?:GPU|CUDA|device)[ :]?\d",
        r"not enough memory on (?:the )?(?:device|GPU|cuda)",
        r"GPU memory.{0,40}could not be allocated|Error Code \d+: OutOfMemory",  # TensorRT
        r"try to increase --mem-fraction-static",  # SGLang
        r"Out of memory allocating [\d,]+ bytes"),  # CuPy
    # types whose words matched nothing above
    types_named("device_oom", "tensorflow", "ResourceExhaustedError"),
    types_named("device_oom", "torch", "OutOfMemoryError CUDAOutOfMemoryError"),
    types_named("host_oom", "python", "MemoryError"),
    words("host_oom", None,
        r"std::bad_alloc|\bbad allocation\b",
        r"\b(?:failed|unable|could not|cannot|can't) (?:to )?allocate (?:\w+ )?memory\b",
        r"\bmemory allocation (?:failed|failure|error)\b",
        r"(?:failed|unable|could not|cannot|can't) (?:to )?allocate [\d.,]+ ?(?:bytes|[KMGT]i?B)\b",
    ),
    words("device_oom", "cuda",
        # cudaGetErrorString's words; the C library's are "Cannot allocate memory"
        r"^(?:\w+Error: )?(?:\(?\w+\)? )?out of memory\b",
        r"[:)\]] ?out of memory[.!]?(?: |$)"),
)
# fmt: on

# oneDNN reports exhausted memory like a call that it does not support; believed on evidence only
UNCLEAR = words(
    "host_oom",
    "onednn",
    r"could not (?:create|execute|clone) (?:an? |the )?"
    r"(?:primitive|memory object|memory$|stream|engine|sdpa|BRGeMM|compiled_partition)",
    clue=Clue.UNCLEAR,
)

# vLLM raises a ValueError for it; of those nothing else is believed
NOT_ENOUGH_FOR_VLLM = words(
    "device_oom",
    "vllm",
    r"^(?:.*ValueError: )?No available memory for the cache blocks",
    r"^(?:.*ValueError: )?Free memory on device .{0,80}less than desired GPU memory utilization",
)
