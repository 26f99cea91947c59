"""Devices that fail or are not available, peers and downloads that fail, and stops as text."""

from __future__ import annotations

from robust_train.failures.patterns import Pattern, types_named, words
from robust_train.values import Clue

# fmt: off
DEVICES: tuple[Pattern, ...] = (
    # --- a device that fails ---
    words("device_fault", "cuda",
        r"uncorrectable (?:ECC|NVLink) error|ECC_UNCORRECTABLE|ECCUncorrectable|double[- ]bit ECC",
        r"NVLINK_UNCORRECTABLE|NvlinkUncorrectable|CUDA error: Nvlink|over nvlink or a hardware",
        r"GPU is lost|GPU_IS_LOST|fallen off the bus",
        # 13, 31, 43 and 45 are a program's errors (docs.nvidia.com/deploy/xid-errors)
        r"\bXid\b ?(?:\(|\d|error|\[)(?!.{0,40}\b(?:13|31|43|45)\b)",
        r"Unable to determine the device handle for GPU", clue=Clue.HARDWARE),
    words("device_fault", "cuda",
        # virtual memory management, which expandable segments need (pytorch#192330, #112957)
        r"CUDA driver error: (?!out of memory|invalid device ordinal|initialization)\w",
        r"CUDA error: operation not supported(?! on)",
        r"cudaErrorNotSupported|CUDA_ERROR_NOT_SUPPORTED",
        r"INTERNAL ASSERT FAILED at .{0,80}driver_api\.cpp", clue=Clue.DRIVER),
    words("device_fault", "cuda",
        r"\bXid\b ?(?:\(|\d|error|\[)",
        r"illegal memory access|ILLEGAL_ADDRESS|IllegalAddress",
        r"unspecified launch failure|\bLAUNCH_FAILED\b|ERROR_LAUNCH_FAILED|LaunchFailure",
        r"misaligned address|MISALIGNED_ADDRESS|MisalignedAddress",
        r"illegal instruction was encountered|ILLEGAL_INSTRUCTION\b|cudaErrorIllegalInstruction",
        r"hardware stack error|HARDWARE_STACK_ERROR|HardwareStackError",
        r"invalid program counter|INVALID_PC\b|InvalidPc\b",
        r"operation not supported on global/shared address space|INVALID_ADDRESS_SPACE",
        r"launch timed out and was terminated|LAUNCH_TIMEOUT|LaunchTimeout",
        r"\bCUDA (?:driver |runtime )?error: (?:unknown error|contained|the GPU)",
        r"cuda runtime error \((?:30|999)\) ?: ?unknown error",
        r"CUDA_ERROR_UNKNOWN|cudaErrorUnknown|HIP error: (?:unknown error|an illegal)",
        r"CUDA_ERROR_CONTAINED|cudaErrorContained|TENSOR_MEMORY_LEAK|cudaErrorTensorMemoryLeak",
        r"\[7(?:00|02|1[4-9])\] Call to cu\w+ results in",  # numba has no names for these
        r"external device has been (?:lost|removed)|CUDA_ERROR_EXTERNAL_DEVICE"),
    words("device_fault", "rocm",
        r"Memory access fault by GPU|HSA_STATUS_ERROR_(?:EXCEPTION|MEMORY_FAULT|MEMORY_APERTURE)",
        r"amdgpu.{0,60}ring \w+ timeout|GPU (?:reset|hang)\b|HW Exception by GPU"),
    words("device_fault", "xpu", r"ERROR_DEVICE_LOST|\bDEVICE_LOST\b"),
    words("device_fault", "mps", r"kIOGPUCommandBufferCallbackError(?!OutOfMemory)\w+"),
    words("device_fault", "cublas",
        r"(?:CU|HIP)BLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"),
    words("device_fault", "cudnn",
        r"CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"),
    words("device_fault", "cusolver", r"CUSOLVER_STATUS_EXECUTION_FAILED"),
    words("device_fault", "cufft", r"CUFFT_EXEC_FAILED"),
    # --- a device that is not available ---
    words("device_unavailable", "cuda",
        r"devices?(?:\(s\))? (?:is/are|are|is) busy or unavailable",
        r"DEVICE_UNAVAILABLE|cudaErrorDevicesUnavailable|DEVICE_NOT_AVAILABLE",
        r"exclusive-thread device already in use|DeviceAlreadyInUse",
        r"MPS (?:client failed to connect|server is not ready)|cudaErrorMps\w+|CUDA_ERROR_MPS_\w+",
        r"between the MPS server and the MPS client failed|MPS client has been terminated",
        r"required to (?:create MPS client|support device connections) have been exhausted",
        clue=Clue.BUSY),
    words("device_unavailable", "cuda",
        r"invalid device ordinal|CUDA_ERROR_INVALID_DEVICE\b|cudaErrorInvalidDevice\b",
        r"no (?:CUDA|ROCm|HIP)-capable device|CUDA_ERROR_NO_DEVICE|(?:cuda|hip)ErrorNoDevice",
        r"No (?:CUDA|HIP|ROCm) GPUs are available|No XPU devices? (?:is|are) available",
        r"no NVIDIA driver|NVIDIA driver on your system is too old",
        r"driver version is insufficient|InsufficientDriver|Insufficient Driver",
        r"not compiled with (?:CUDA|XPU|MPS|HIP|ROCm|GPU) ?(?:enabled|support)?",
        r"(?:compiled|built) without (?:CUDA|GPU)|not linked with support for \w+ devices",
        r"no kernel image is available|NO_BINARY_FOR_GPU|NoKernelImageForDevice|NoBinaryForGpu",
        r"(?:CUDA|HIP) error.{0,20}invalid device function|InvalidDeviceFunction",
        r"device kernel image is invalid|API call is not supported in the installed",
        r"unsupported toolchain|UNSUPPORTED_PTX_VERSION|UnsupportedPtxVersion",
        r"forward compatibility was attempted|COMPAT_NOT_SUPPORTED_ON_DEVICE",
        r"system not yet initialized|SYSTEM_NOT_READY|SystemNotReady",
        r"unsupported display driver|SYSTEM_DRIVER_MISMATCH|SystemDriverMismatch",
        r"driver initialization failed, you might not have",
        r"Driver/library version mismatch|NVML_ERROR_(?:DRIVER_NOT_LOADED|LIB\w+)",
        r"\bDriver Not Loaded\b|NVML.{0,40}Shared Library Not Found",
        r"Unable to initialize backend '(?:cuda|gpu|rocm|tpu)'|No visible \w+ devices",  # JAX
        r"The MPS backend is supported on",
        r"couldn't communicate with the NVIDIA driver",
        r"lib(?:cuda|nvidia-ml)\.so(?:\.\d)?: cannot open|CUDA driver library cannot be found",
        r"no GPUs? (?:was |were )?(?:found|detected)|(?:^|: )No devices were found",
        r"(?:CUDA|HIP).{0,20}error.{0,20}initialization error|CUDA_ERROR_NOT_INITIALIZED",
        r"CUDA unknown error - this may be due|Unexpected error from cudaGetDeviceCount",
        r"(?:CUDNN|CUBLAS)_STATUS_ARCH_MISMATCH",
        r"not compatible with the current PyTorch installation",
        r"(?<!_)\b(?:CUDA|MPS|XPU|ROCm) (?:is )?not available\b",
        r"Unable to find code object for all current devices",
        r"driver shutting down|operation not supported on this OS",
        r"Cannot access accelerator device when none is available"),
)
# fmt: on

# fmt: off
NETWORK: tuple[Pattern, ...] = (
    # --- peers ---
    words("comm", "nccl",
        r"Watchdog caught collective operation timeout|collective operation timeout",
        r"ncclSystemError|ncclRemoteError|ncclInternalError|ncclUnhandledCudaError|ncclInProgress",
        r"\bNCCL\b.{0,200}(?:unhandled (?:system|cuda) error|timed? ?out|timeout|aborted|remote "
        r"process|remote error|internal error|connection|socket|no heartbeat|async\w* error"
        r"|system error|completion.{0,40}error)",
        r"watchdog (?:thread )?(?:got stuck|terminated|timeout)|monitoring thread detects no heart",
        r"Heartbeat monitor timed out|detected by watchdog at work|dump signal due to a collective",
        r"watchdog thread terminated with exception|NCCL communicator encountered error",
        r"remote error detected from rank|Proxy Call to rank \d+ failed|socketPollConnect",
        r"NET/(?:IB|Socket).{0,200}(?:error|fail|timed out|closed)|\bIBV_WC_\w+"),
    words("comm", "gloo",
        r"\bgloo\b.{0,300}(?:connect|timed out|timeout|closed|reset|refused|broken pipe|read error"
        r"|write error|no route|unreachable|bind|resolve)",
        r"Timed out waiting \d+ ?ms for (?:send|recv) operation",
        r"timed out after \d+ ?ms waiting for (?:send|recv)",
        r"Application timeout caused pair closure|monitoredBarrier",
        r"connectFullMesh|Connect timeout \["),
    words("comm", "hccl",
        r"\bHCCL\b.{0,200}(?:time[d ]? ?out|connect|remote)|Notify register times out"),
    words("comm", "torch.distributed",
        r"client socket has (?:timed out|failed)|server socket has failed",
        r"Timed out (?:after \d+ seconds )?waiting for (?:clients|workers)|\d+ clients joined",
        r"\b(?:TCPStore|c10d|store|rendezvous)\b.{0,160}(?:time[d ]? ?out|broken pipe"
        r"|failed to recv|connection (?:reset|closed|refused|was)|failed to connect|has failed)",
        r"wait timeout after \d+ ?ms|\bSocket Timeout\b",
        r"failed to recv, got 0 bytes|recvValue failed|(?:send|recv)Bytes failed",
        r"Timed out initializing process group|barrier .{0,20}time[d ]? ?out",
        r"connect\(\) timed out|(?:^|RuntimeError: )Broken pipe$",
        r"RPC ran for more than set timeout",
        r"Connection (?:closed|reset) by (?:remote )?peer|Connection reset by",
        r"peer closed connection|connection was forcibly closed by the remote host",
        r"\[Errno (?:101|104|110|111|113)\]|EADDRINUSE|Address already in use"),
    types_named("comm", "torch.distributed",
        "DistNetworkError DistStoreError DistBackendError RendezvousConnectionError "
        "RendezvousTimeoutError RendezvousClosedError ConnectionResetError "
        "ConnectionRefusedError ConnectionAbortedError HorovodInternalError"),
    # --- weights and data that could not be fetched ---
    words("bug", "http", r"NameResolutionError|certificate verify failed|OfflineModeIsEnabled"),
    words("comm", "http",
        r"\b(?:408|5\d\d) (?:Server|Client) Error\b|Server error '5\d\d|HTTP Error 5\d\d",
        r"\b5\d\d, message=|\b5\d\d (?:GET|HEAD) https?://|\(50\d\) when calling the \w+ oper",
        r"\b50\d (?:Bad Gateway|Gateway Time-?out|Service (?:Temporarily )?Unavailable)",
        r"timed? ?out\.? ?\((?:read|connect) timeout|Read timed out",
        r"HTTPS?ConnectionPool\(.{0,400}(?:timed out|Connect(?:ion)? ?(?:timeout|refused|aborted))",
        r"the (?:read|write|handshake) operation timed out",
        r"(?:^|\btimeout: |TimeoutError: )timed out$",
        r"<urlopen error (?:timed out|\[Errno -3\])|Temporary failure in name resolution",
        r"Connection broken: |IncompleteRead\(|retrieval incomplete: got only",
        r"Remote end closed connection|Server (?:has )?disconnected|Connection aborted",
        r"UNEXPECTED_EOF_WHILE_READING|Timeout on reading data from socket",
        r"Couldn't reach .{0,200}\(\w*(?:Timeout|Error)|We couldn't connect to 'https?://",
        r"read timeout on endpoint url|Could not connect to the endpoint URL", clue=Clue.DOWNLOAD),
    types_named("comm", "http",
        "ReadTimeout ConnectTimeout PoolTimeout ReadTimeoutError ConnectTimeoutError "
        "ChunkedEncodingError IncompleteRead RemoteDisconnected RemoteProtocolError "
        "ContentTooShortError ServerDisconnectedError ServerTimeoutError ClientPayloadError "
        "FSTimeoutError", clue=Clue.DOWNLOAD),
    # --- stopped, as text ---
    words("interrupted", None,
        r"^(?:\w+\.)*KeyboardInterrupt\b",
        r"\bgot signal: (?:1|2|10|12|15)\b|Received (?:1|2|15) death signal",
        r"terminated with signal SIG(?:KILL|TERM|INT|HUP|USR[12])",
        r"Signal (?:9|15|2) \(SIG\w+\) received by PID",
        r"DUE TO (?:TIME LIMIT|PREEMPTION)|\(state: (?:PREEMPTED|TIMEOUT|CANCELLED)"),
)
# fmt: on
