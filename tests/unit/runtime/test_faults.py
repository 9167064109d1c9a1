"""Who is to blame: samples of what ranks raise when a peer has gone, and the choice of the culprit."""

from dataclasses import replace

import pytest

from resilient.recovery.faults import Raised, WorkerEnd, blames_a_peer, culprit, from_ends

PEER_GONE = [
    (
        "RuntimeError",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4123",
    ),
    (
        "RuntimeError",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [10.88.0.12]: Connection reset by peer",
    ),
    (
        "RuntimeError",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation",
    ),
    ("DistNetworkError", "The client socket has failed to connect to any network address of (n1, 29500)."),
    ("DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0//cuda//default"),
    (
        "DistBackendError",
        "NCCL error in: ProcessGroupNCCL.cpp:1333, remote process exited or there was a network error",
    ),
    ("RuntimeError", "Software caused connection abort"),
]
OWN = [
    ("ValueError", "bad thing"),
    ("RuntimeError", "The size of tensor a (3) must match the size of tensor b (4)"),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB"),
    ("KeyError", "'timeout'"),
]


def raised(kind: str, message: str, t: float = 10.0) -> Raised:
    return Raised(kind, message, f"Traceback ...\n{kind}: {message}", t)


def end(rank: int, *, exitcode: int = 1, t: float = 10.0, why: Raised | None = None, step: int = 4) -> WorkerEnd:
    return WorkerEnd(rank, 0, 1000 + rank, exitcode, t, step, "step", why)


@pytest.mark.parametrize(("kind", "message"), PEER_GONE)
def test_what_a_lost_peer_makes_a_rank_raise_blames_the_peer(kind, message):
    assert blames_a_peer(raised(kind, message))


@pytest.mark.parametrize(("kind", "message"), OWN)
def test_a_ranks_own_failure_blames_nobody_else(kind, message):
    assert not blames_a_peer(raised(kind, message))


def test_the_rank_with_its_own_failure_is_the_culprit_even_if_heard_of_last():
    victim = end(0, t=10.0, why=raised(*PEER_GONE[0], t=10.0))
    first = end(1, t=10.4, why=raised("ValueError", "boom", t=10.3))
    assert culprit([victim, first]) is first


@pytest.mark.parametrize(
    "causes",
    [
        "RuntimeError: [/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:4994: Connection reset by peer",
        "KeyError: 'x'\nDistBackendError: ",
        "RuntimeError: the forward pass failed\nRuntimeError: Connection closed by peer [10.0.0.1]:4711",
    ],
)
def test_an_exception_that_comes_from_a_lost_peer_blames_the_peer(causes):
    wrapped = replace(raised("RuntimeError", "\n  [Stage 1] failed to run forward:"), causes=causes)
    assert blames_a_peer(wrapped)
    assert not blames_a_peer(replace(wrapped, causes="ValueError: boom\nKeyError: 'DistBackendError:'"))


def test_an_exception_is_told_by_its_first_words_and_by_the_meaning_of_its_cause():
    wrapped = replace(
        raised("RuntimeError", "\n  [Stage 1] failed to run:\n  x"), causes="OSError: [Errno 28] No space left on device"
    )
    fault = from_ends("x", [end(0, why=wrapped)], resumed_step=0, now=10.0)
    assert fault.detail == "RuntimeError: [Stage 1] failed to run:; a file system is full or over its quota"
    assert fault.verdict == "node"


def test_a_killed_rank_is_the_culprit_before_ranks_that_lost_their_peer():
    victim = end(0, t=10.0, why=raised(*PEER_GONE[1], t=9.9))
    killed = end(1, exitcode=-9, t=10.1)
    assert culprit([victim, killed]) is killed


def test_of_two_failures_of_their_own_the_earlier_is_the_culprit():
    later, earlier = end(0, why=raised("ValueError", "x", t=5.2)), end(1, why=raised("ValueError", "x", t=5.1))
    assert culprit([later, earlier]) is earlier


def test_a_rank_that_ended_well_is_never_the_culprit():
    assert culprit([end(0, exitcode=0, t=1.0), end(1, exitcode=-11, t=2.0)]).rank == 1


def test_a_program_that_leaves_by_a_number_has_that_exit_code_and_the_place_it_left_at():
    why = Raised("SystemExit", "3", "Traceback ...\nSystemExit: 3", 10.0)
    fault = from_ends("x", [end(0, exitcode=3, why=why)], resumed_step=0, now=10.0)
    assert (fault.kind, fault.cause, fault.detail, fault.verdict) == ("exit", "exit code 3", "exit code 3", None)
    assert fault.evidence.endswith("by exit code 3 in phase step\nTraceback ...\nSystemExit: 3")
    logged = replace(end(0, exitcode=3, why=why), log="OSError: [Errno 28] No space left on device\n")
    assert from_ends("x", [logged], resumed_step=0, now=10.0).verdict == "node", "its log is asked, as without an exception"
    said = replace(why, message="no GPU is free")
    assert from_ends("x", [end(0, why=said)], resumed_step=0, now=10.0).detail == "SystemExit: no GPU is free"


def test_a_rank_that_left_its_peers_with_status_0_is_the_culprit():
    victim = end(0, t=10.1, why=raised(*PEER_GONE[0], t=10.0), step=10)
    left = end(1, exitcode=0, t=10.2, step=10)
    fault = from_ends("x", [victim, left], resumed_step=0, now=10.5)
    assert (fault.kind, fault.cause, fault.ranks, fault.step, fault.verdict) == ("exit", "exit code 0", (1,), 11, None)
    assert fault.detail == "exit code 0 after step 10, while rank 0 went on"
    assert "rank 0 lost it: RuntimeError" in fault.evidence
    others = [victim, replace(victim, rank=2), left]
    assert from_ends("x", others, resumed_step=0, now=10.5).detail.endswith("while ranks 0, 2 went on")
    unknown = [victim, replace(left, step=-1)]
    assert from_ends("x", unknown, resumed_step=None, now=10.5).detail == "exit code 0, while rank 0 went on"


def test_a_rank_that_ended_well_when_it_was_to_stop_or_after_the_failure_is_no_culprit():
    victim = end(0, t=10.1, why=raised(*PEER_GONE[0], t=10.0))
    left = end(1, exitcode=0, t=10.2)
    assert culprit([victim, left], stopped=True) is victim
    assert culprit([victim, replace(left, noticed_t=15.0)]) is victim
    killed = end(2, exitcode=-9, t=10.3)
    assert culprit([victim, left, killed]) is killed


def test_an_exception_becomes_a_fault_with_its_traceback_and_step():
    fault = from_ends("g1-1", [end(1, why=raised("ValueError", "boom\nmore", t=9.0))], resumed_step=0, now=9.5)
    assert (fault.kind, fault.ranks, fault.step, fault.detail) == ("exception", (1,), 5, "ValueError: boom")
    assert "Traceback" in fault.evidence
    assert fault.detect_s == pytest.approx(0.5)


def test_of_an_exception_with_a_long_text_the_detail_is_a_line_that_can_be_read():
    failed = end(0, why=raised("ValueError", "bad batch: " + "7, " * 2000))
    lost = end(0, why=raised("RuntimeError", "Connection closed by peer " + "7, " * 2000))
    for fault in (from_ends("x", [failed], resumed_step=0, now=9.5), from_ends("x", [lost], resumed_step=0, now=9.5)):
        assert len(fault.detail) < 600 and " ..." in fault.detail
    assert fault.evidence.endswith("7, "), "the evidence has it already"


def test_a_signal_becomes_a_fault_that_names_it():
    fault = from_ends("g1-1", [end(1, exitcode=-9, step=-1)], resumed_step=40, now=10.0)
    assert (fault.kind, fault.detail, fault.step) == ("exit", "SIGKILL", 41)


def test_a_worker_that_ends_before_it_has_said_where_it_starts_is_at_no_step():
    assert from_ends("g4-4", [end(0, exitcode=-9, step=-1)], resumed_step=None, now=10.0).step is None
    assert from_ends("g4-4", [end(0, exitcode=-9, step=7)], resumed_step=None, now=10.0).step == 8


def test_a_collective_that_timed_out_is_told_apart():
    assert from_ends("x", [end(0, why=raised(*PEER_GONE[2]))], resumed_step=0, now=10.0).kind == "collective_timeout"


def test_the_same_exception_with_other_words_is_the_same_failure():
    first = from_ends("a", [end(0, why=raised("ValueError", "at 0x7f01"))], resumed_step=0, now=10.0)
    second = from_ends("b", [end(1, why=raised("ValueError", "at 0x7f02"))], resumed_step=0, now=11.0)
    assert first.signature == second.signature


WATCHDOG = "ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)"


def test_a_fault_has_the_class_of_its_cause_and_says_what_it_means():
    why = raised("RuntimeError", "CUDA error: uncorrectable ECC error encountered")
    fault = from_ends("x", [end(0, why=why)], resumed_step=0, now=10.0)
    assert fault.verdict == "node"
    assert fault.detail == (
        "RuntimeError: CUDA error: uncorrectable ECC error encountered; a GPU has an uncorrectable memory or link error"
    )
    assert from_ends("x", [end(0, why=raised("ValueError", "boom"))], resumed_step=0, now=10.0).verdict is None


def test_the_line_of_the_log_that_explains_an_exception_is_evidence():
    line = "NCCL WARN NET/IB : Got completion from peer 10.0.0.1<33> with status=12 opcode=0 len=0 vendor err 129 (Send)"
    failed = replace(end(0, why=raised(*PEER_GONE[5])), log=f"noise\n{line}\nnoise")
    fault = from_ends("x", [failed], resumed_step=0, now=10.0)
    assert fault.evidence.endswith(f"\nin its log: {line}")
    assert fault.verdict == "transient"


def test_a_rank_that_nccls_watchdog_ended_is_a_victim_and_its_kind_a_timeout():
    aborted = replace(end(0, exitcode=-6, t=10.0), log=f"{WATCHDOG}\nterminate called\n")
    assert aborted.victim
    assert from_ends("x", [aborted], resumed_step=0, now=10.0).kind == "collective_timeout"
    assert culprit([aborted, end(1, exitcode=-9, t=10.1)]).rank == 1
    assert not replace(aborted, log="assertion failed\n").victim


def test_what_stands_in_the_log_of_a_killed_rank_about_peers_is_not_its_cause():
    killed = replace(end(0, exitcode=-9), log=f"{WATCHDOG}\n")
    assert not killed.victim
    fault = from_ends("x", [killed], resumed_step=0, now=10.0)
    assert (fault.kind, fault.detail, fault.verdict) == ("exit", "SIGKILL", None)


def test_a_rank_killed_for_the_nodes_memory_says_so():
    killed = replace(end(0, exitcode=-9), log="slurmstepd: error: Detected 1 oom_kill event in StepId=1130.0.\n")
    fault = from_ends("x", [killed], resumed_step=0, now=10.0)
    assert (fault.detail, fault.verdict) == ("SIGKILL; the node's memory is too small for this", "deterministic")


@pytest.mark.parametrize(
    "message",
    [
        "NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL version 2.26.2\nncclInvalidUsage: Duplicate GPU detected",
        "The server socket has failed to listen on any local network address. port: 29500, name: EADDRINUSE",
    ],
)
def test_an_error_of_communication_that_is_a_ranks_own_blames_nobody_else(message: str):
    assert not blames_a_peer(raised("DistBackendError", message))


def test_the_end_of_a_run_that_cannot_go_on_is_told_with_its_own_words_alone():
    why = Raised("UnrecoverableError", "no space left on device", "Traceback ...", 10.0, final=70)
    fault = from_ends("x", [end(0, why=why)], resumed_step=0, now=10.0)
    assert (fault.verdict, fault.evidence) == (None, "no space left on device")


def test_too_little_memory_of_a_gpu_right_after_a_restart_need_not_come_again():
    ends = [end(0, t=130.0, why=raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB", t=130.0))]
    assert from_ends("f", ends, resumed_step=4, now=130.1).verdict == "deterministic", "the first ranks of a job"
    soon = from_ends("f", ends, resumed_step=4, now=130.1, restarted_t=100.0)
    assert soon.verdict == "transient" and "30 s after a restart" in soon.detail
    assert from_ends("f", ends, resumed_step=4, now=130.1, restarted_t=60.0).verdict == "deterministic"
    other = [end(0, t=130.0, why=raised("RuntimeError", "CUDA error: device-side assert triggered", t=130.0))]
    assert from_ends("f", other, resumed_step=4, now=130.1, restarted_t=100.0).verdict == "deterministic"
