"""What real messages say of their cause: samples from the issue trackers of NCCL, PyTorch, gloo, UCX and others, and from here."""

import errno
import os

import pytest

from resilient.recovery.symptoms import TABLE, UNNAMED, diagnose, read, unreadable_files, waited_in_vain

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
RETRY = (
    "host-7:984:1357 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 172.36.143.59<44206> with status=12 "
    "opcode=129 len=65536 vendor err 129 (Recv) localGid ::ffff:29.87.88.182 remoteGids::ffff:29.87.4.221"
)
REMOTE = (
    "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1347, remote process exited or there was "
    "a network error, NCCL version 2.18.5\nncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely."
)
WATCHDOG = (
    "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 "
    "milliseconds before timing out."
)
CLOSED = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4123"

TRANSIENT = [
    (CLOSED, "a peer closed"),
    (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [10.88.0.12]: Connection reset by peer",
        "was reset",
    ),
    (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv "
        "operation to complete",
        "gloo waited",
    ),
    (
        "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for send operation to complete",
        "gloo",
    ),
    ("RuntimeError: Software caused connection abort", "a peer closed"),
    (REMOTE, "a peer of NCCL ended"),
    (RETRY, "InfiniBand gave up"),
    (
        "NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0, vendor err 129",
        "InfiniBand gave up",
    ),
    ("mlx5_0: Got completion with error IBV_WC_RETRY_EXC_ERR(12)", "InfiniBand gave up"),
    (
        "[jwb0296:32182:0:32182] ib_mlx5_log.c:145  Transport retry count exceeded on mlx5_2:1/IB "
        "(synd 0x15 vend 0x81 hw_synd 0/0)",
        "InfiniBand gave up",
    ),
    (
        "NET/IB : Got completion from peer 172.21.17.89<38536> with error 5, opcode 48, len 32710, vendor err 249",
        "the network reports",
    ),
    (
        "NET/OFI Request 0x7f14cc5b60c0 completed with error. RC: 113. Error: 2 (UNDELIVERABLE). Completed length: 0",
        "the network reports",
    ),
    (
        "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled system error, "
        "NCCL version 2.18.1\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "a system call",
    ),
    (
        "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed.",
        "a CUDA call of NCCL",
    ),
    (WATCHDOG, "a collective timed out"),
    (
        "[rank7]:[E626 05:14:36.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 7] ProcessGroupNCCL's "
        "watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.",
        "watchdog was stuck",
    ),
    ("DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//default", "a key of the store"),
    (
        "DistNetworkError: The client socket has timed out after 3000ms while trying to connect to (127.0.0.1, 43319).",
        "was not reached",
    ),
    ("DistNetworkError: The client socket has failed to connect to any network address of (n1, 29500).", "was not reached"),
    (
        "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, "
        "code: -98, name: EADDRINUSE, message: address already in use",
        "a port is taken",
    ),
    ("OSError: [Errno 98] Address already in use", "a port is taken"),
    ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "host name"),
    ("gaierror: [Errno -2] Name or service not known", "host name"),
    (
        "[W socket.cpp:697] [c10d] The IPv6 network addresses of (jwb0001i, 29500) cannot be retrieved (gai error: -2 - Name or "
        "service not known).",
        "host name",
    ),
    ("OSError: [Errno 113] No route to host", "the network to a peer"),
    ("DistBackendError: NCCL communicator was aborted on rank 3.", "ended by another error"),
    ("AcceleratorError: CUDA error: unspecified launch failure", "the kernel log may say why"),
    (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] writev [10.0.0.2]: Bad file descriptor",
        "gloo lost",
    ),
    ("ConnectionRefusedError: [Errno 111] Connection refused", "nobody listens"),
]
NODE = [
    (ECC, "memory or link error"),
    ("CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered", "memory or link error"),
    ("misc/cudawrap.cc:30 NCCL WARN Cuda failure 214 'uncorrectable ECC error encountered'", "memory or link error"),
    ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", "memory or link error"),
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.", "Xid 79"),
    ("NVRM: Xid (PCI:0000:86:00): 48, pid=4242, name=python, An uncorrectable double bit error (DBE) has been detected", "Xid"),
    ("RuntimeError: CUDA error: hardware stack error", "its hardware"),
    ("RuntimeError: No CUDA GPUs are available", "cannot be used"),
    ("misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "ulimit -l"),
    ("misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory", "ulimit -l"),
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "cannot be used"),
    ("RuntimeError: can't start new thread", "ulimit -u"),
    ("RuntimeError: Resource temporarily unavailable", "ulimit -u"),
    ("  what():  Resource temporarily unavailable", "ulimit -u"),
    ("libgomp: Thread creation failed: Resource temporarily unavailable", "ulimit -u"),
    ("OSError: [Errno 28] No space left on device", "full"),
    ("OSError: [Errno 122] Disk quota exceeded: '/p/scratch/x'", "full"),
    ("OSError: [Errno 5] Input/output error", "file system fails"),
    ("OSError: [Errno 116] Stale file handle: '/p/data/x.bin'", "file system fails"),
    (
        "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's workers are "
        "out of shared memory. Please try to raise your shared memory limit.",
        "/dev/shm",
    ),
]
DETERMINISTIC = [
    (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB",
        "the GPU's memory",
    ),
    ("init.cc:400 NCCL WARN Cuda failure 2 'out of memory'", "the GPU's memory"),
    ("RuntimeError: CUDA error: device-side assert triggered", "assertion"),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "outside its memory"),
    ("MemoryError: ", "the node's memory"),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
        "the node's memory",
    ),
    (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM Killed.",
        "the node's memory",
    ),
    ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup.", "the node's memory"),
    (
        "smc-gpu-03:29880:30398 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000",
        "NCCL",
    ),
    (
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1287, invalid usage, NCCL version 2.17.1\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        "NCCL was called",
    ),
    (
        "RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find interface "
        "for: [0.0.31.144]",
        "interface",
    ),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "does not fit"),
]
UNKNOWN = [
    "ValueError: bad sample at step 15",
    "RuntimeError: The size of tensor a (3) must match the size of tensor b (4)",
    "KeyError: 'timeout'",
    "AssertionError: 12",
    "step 28 done, 5 left",
    "",
]


@pytest.mark.parametrize(
    ("text", "meaning", "verdict"),
    [
        *((text, meaning, "transient") for text, meaning in TRANSIENT),
        *((text, meaning, "node") for text, meaning in NODE),
        *((text, meaning, "deterministic") for text, meaning in DETERMINISTIC),
    ],
)
def test_a_message_is_understood(text: str, meaning: str, verdict: str):
    found = read(text)
    assert found is not None
    assert (found.symptom.verdict, meaning in found.symptom.meaning) == (verdict, True), found.symptom.meaning
    assert found.line in text


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_nobody_knows_has_no_class(text: str):
    assert read(text) is None


def test_every_row_of_the_table_has_a_sample():
    samples = [text for group in (TRANSIENT, NODE, DETERMINISTIC) for text, _ in group]
    reached = {found.symptom.meaning for text in samples if (found := read(text)) is not None}
    assert reached == {symptom.meaning for symptom in TABLE}


def test_the_more_telling_line_is_taken_wherever_it_stands():
    for text in (f"{REMOTE}\n{ECC}\n", f"{ECC}\n{REMOTE}\n"):
        found = read(text)
        assert found is not None
        assert found.line == ECC


def test_of_many_lines_alike_the_last_is_the_evidence():
    found = read(f"{WATCHDOG}\n{WATCHDOG.replace('1580', '1581')}\n")
    assert found is not None
    assert "1581" in found.line


def test_a_log_explains_an_exception_that_tells_of_a_symptom_only():
    found = diagnose(REMOTE, f"noise\n{RETRY}\nnoise")
    assert found is not None
    assert found.line == RETRY


def test_a_log_does_not_explain_an_exception_that_is_the_cause():
    assert diagnose("ValueError: bad sample", ECC) is None
    found = diagnose("RuntimeError: CUDA error: device-side assert triggered", ECC)
    assert found is not None
    assert found.symptom.verdict == "deterministic"


def test_without_an_exception_the_log_is_all_there_is():
    found = diagnose(None, f"{WATCHDOG}\nterminate called after throwing an instance of 'c10::DistBackendError'\n")
    assert found is not None
    assert found.symptom.timed_out


def test_waiting_in_vain_is_told_from_a_lost_connection():
    assert waited_in_vain(WATCHDOG)
    assert waited_in_vain(TRANSIENT[2][0])
    assert not waited_in_vain(REMOTE)
    assert not waited_in_vain(CLOSED)


OWN = ("/data/corpus", "data/")


def failed(number: int, path: str | None = "/data/corpus.idx") -> str:
    """As Python tells it."""
    error = OSError(number, os.strerror(number)) if path is None else OSError(number, os.strerror(number), path)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS, errno.EREMOTEIO, errno.EUCLEAN])
def test_an_error_of_storage_is_of_a_file_that_cannot_be_read_wherever_that_is(number):
    assert unreadable_files(failed(number, "/elsewhere/x"), OWN, starting=False) == "/elsewhere/x"
    assert unreadable_files(failed(number, None), OWN, starting=False) == UNNAMED


@pytest.mark.parametrize(
    "number", [errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO]
)
def test_an_error_that_connections_have_too_is_of_storage_where_it_names_a_file(number):
    assert unreadable_files(failed(number), OWN, starting=False) == "/data/corpus.idx"
    assert unreadable_files(failed(number, None), OWN, starting=True) is None


@pytest.mark.parametrize(
    ("text", "starting", "path"),
    [
        (failed(errno.ENOENT), False, "/data/corpus.idx"),
        (failed(errno.ENOENT, "data/shard-3"), False, "data/shard-3"),
        (failed(errno.ENOENT, "/tmp/results.txt"), False, None),
        (failed(errno.ENOENT, "/tmp/it's.txt"), True, "/tmp/it's.txt"),
        (failed(errno.ENOENT, None), True, None),
        (f"MissingError: there is no /data/corpus.idx; build it\n{failed(errno.ENOENT)}", False, "/data/corpus.idx"),
        (
            f"RuntimeError: Caught OSError in DataLoader worker process 0.\nTraceback\n{failed(errno.ESTALE)}",
            False,
            "/data/corpus.idx",
        ),
        ("SafetensorError: I/O error: Input/output error (os error 5)", False, UNNAMED),
        (failed(errno.EACCES), True, None),
        (failed(errno.ENOSPC), True, None),
        (failed(errno.ECONNRESET), True, None),
        ("ValueError: no such file", True, None),
    ],
)
def test_files_that_are_missing_are_told_from_names_that_are_wrong(text, starting, path):
    assert unreadable_files(text, OWN, starting=starting) == path
