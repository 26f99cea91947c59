"""Peers that are gone, downloads that fail, and processes that were asked to stop."""

from __future__ import annotations

from robust_train.failures.patterns import (
    BUG,
    COMM,
    INTERRUPTED,
    Pattern,
    types_named,
    words,
)
from robust_train.values import Clue

NETWORK: tuple[Pattern, ...] = (
    # --- peers ---
    words(
        COMM,
        "nccl",
        r"Watchdog caught collective operation timeout|collective operation timeout",
        r"ncclSystemError|ncclRemoteError|ncclInternalError|ncclUnhandledCudaError|ncclInProgress",
        r"\bNCCL\b.{0,200}(?:unhandled (?:system|cuda) error|timed? ?out|timeout|aborted|remote "
        r"process|remote error|internal error|connection|socket|no heartbeat|async\w* error"
        r"|system error|completion.{0,40}error)",
        r"watchdog (?:thread )?(?:got stuck|terminated|timeout)|monitoring thread detects no heart",
        r"Heartbeat monitor timed out|detected by watchdog at work|dump signal due to a collective",
        r"watchdog thread terminated with exception|NCCL communicator encountered error",
        r"remote error detected from rank|Proxy Call to rank \d+ failed|socketPollConnect",
        r"NET/(?:IB|Socket).{0,200}(?:error|fail|timed out|closed)|\bIBV_WC_\w+",
    ),
    words(
        COMM,
        "gloo",
        r"\bgloo\b.{0,300}(?:connect|timed out|timeout|closed|reset|refused|broken pipe|read error"
        r"|write error|no route|unreachable|bind|resolve)",
        r"Timed out waiting \d+ ?ms for (?:send|recv) operation",
        r"timed out after \d+ ?ms waiting for (?:send|recv)",
        r"Application timeout caused pair closure|monitoredBarrier",
        r"connectFullMesh|Connect timeout \[",
    ),
    words(
        COMM,
        "hccl",
        r"\bHCCL\b.{0,200}(?:time[d ]? ?out|connect|remote)|Notify register times out",
    ),
    words(
        COMM,
        "torch.distributed",
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
        r"\[Errno (?:101|104|110|111|113)\]|EADDRINUSE|Address already in use",
    ),
    types_named(
        COMM,
        "torch.distributed",
        "DistNetworkError DistStoreError DistBackendError RendezvousConnectionError "
        "RendezvousTimeoutError RendezvousClosedError ConnectionResetError "
        "ConnectionRefusedError ConnectionAbortedError HorovodInternalError",
    ),
    # --- weights and data that could not be fetched ---
    words(BUG, "http", r"NameResolutionError|certificate verify failed|OfflineModeIsEnabled"),
    words(
        COMM,
        "http",
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
        r"read timeout on endpoint url|Could not connect to the endpoint URL",
        clue=Clue.DOWNLOAD,
    ),
    types_named(
        COMM,
        "http",
        "ReadTimeout ConnectTimeout PoolTimeout ReadTimeoutError ConnectTimeoutError "
        "ChunkedEncodingError IncompleteRead RemoteDisconnected RemoteProtocolError "
        "ContentTooShortError ServerDisconnectedError ServerTimeoutError ClientPayloadError "
        "FSTimeoutError",
        clue=Clue.DOWNLOAD,
    ),
    # --- stopped, as text ---
    words(
        INTERRUPTED,
        None,
        r"^(?:\w+\.)*KeyboardInterrupt\b",
        r"\bgot signal: (?:1|2|10|12|15)\b|Received (?:1|2|15) death signal",
        r"terminated with signal SIG(?:KILL|TERM|INT|HUP|USR[12])",
        r"Signal (?:9|15|2) \(SIG\w+\) received by PID",
        r"DUE TO (?:TIME LIMIT|PREEMPTION)|\(state: (?:PREEMPTED|TIMEOUT|CANCELLED)",
    ),
)
