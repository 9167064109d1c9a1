"""What the GPUs' driver writes to the kernel log: read all the time, told to the ledger, and what follows for the node."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient.agent import node_events
from resilient.agent.loop import Loop
from resilient.agent.oom import KernelLog
from resilient.health.gpus import judge_faults
from resilient.protocol.messages import AgentMessage, Health
from resilient.recovery.faults import Raised, WorkerEnd, from_ends
from resilient.recovery.xids import TABLE, Class, parse

# As /dev/kmsg has them.
BUS = "4,1234,9876,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
FAULT = (
    "4,1235,9877,-;NVRM: Xid (PCI:0000:86:00): 31, pid=4242, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS "
    "GPCCLIENT_T1_0 faulted @ 0x7f6c_1a000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ\n"
)
ACTION = "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from"
OTHERS = (
    "6,1200,9000,-;nvidia-nvlink: Nvlink Core is being initialized, major device number 509\n",
    "4,1201,9001,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.104.05\n",
    "3,1,1,-;Out of memory: Killed process 77 (python)\n SUBSYSTEM=memory\n",
)


@pytest.mark.parametrize(
    ("line", "gpu", "number", "pid", "verdict"),
    [
        (BUS, "0000:3b:00", 79, None, "replace"),
        (FAULT, "0000:86:00", 31, 4242, "application"),
        ("NVRM: Xid (PCI:0000:b1:00): 94, pid=88, name=python, Contained: CE User Channel", "0000:b1:00", 94, 88, "application"),
        ("NVRM: Xid (PCI:0000:b1:00): 95, pid='7', Uncontained: LTC TAG (0x2,0x0)", "0000:b1:00", 95, 7, "reset"),
        ("NVRM: Xid (PCI:0000:07:00): 63, Row Remapper: New row marked for remapping", "0000:07:00", 63, None, "note"),
        ("NVRM: Xid (PCI:0000:07:00): 119, pid=1, name=x, Timeout waiting for RPC from GSP!", "0000:07:00", 119, 1, "reset"),
        (f"{ACTION} 0x0 (None) to 0x1 (GPU Reset Required)", "0008:01:00", 154, None, "reset"),
        (f"{ACTION} 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)", "0008:01:00", 154, None, "replace"),
        (f"{ACTION} 0x1 (GPU Reset Required) to 0x0 (None)", "0008:01:00", 154, None, "note"),
        ("NVRM: Xid (0000:03:00): 4711, something new", "0000:03:00", 4711, None, "note"),
    ],
)
def test_an_xid_is_understood(line: str, gpu: str, number: int, pid: int | None, verdict: Class):
    (xid,) = parse([line])
    assert (xid.gpu, xid.number, xid.pid, xid.verdict) == (gpu, number, pid, verdict)


def test_what_else_the_kernel_says_is_none():
    assert not list(parse(OTHERS))


def test_a_fault_that_a_reset_must_heal_keeps_the_node_out_and_others_do_not():
    verdicts = {number: judge_faults(list(parse([f"NVRM: Xid (PCI:0:0): {number}, x"])))[0].verdict for number in TABLE}
    assert {verdicts[number] for number in (48, 62, 64, 74, 79, 95, 119, 120, 140)} == {"fail"}
    assert {verdicts[number] for number in (13, 31, 43, 45, 63, 94)} == {"warn"}


def test_a_fault_that_needs_a_reset_names_one_of_the_nodes_own_devices():
    faults = list(parse([BUS, FAULT, BUS.replace("3b", "99")]))
    found = judge_faults(faults, ("0000:86:00.0", "", "0000:3b:00.0"))
    assert [(each.verdict, each.device) for each in found] == [("fail", 2), ("warn", None), ("fail", None)]


def test_an_xid_in_the_kernel_log_says_why_a_gpu_failed():
    raised = Raised("AcceleratorError", "CUDA error: unspecified launch failure", "Traceback", 1.0)
    end = WorkerEnd(0, 0, 7, 1, 1.0, 5, "step", raised, log=f"loss 2.3\n{BUS.partition(';')[2].strip()}")
    assert from_ends("f", [end], resumed_step=0, now=2.0).verdict == "node"
    alone = WorkerEnd(0, 0, 7, 1, 1.0, 5, "step", raised, log="loss 2.3")
    assert from_ends("f", [alone], resumed_step=0, now=2.0).verdict == "transient"


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """The handlers of signals as they were."""
    before = {sig: signal.getsignal(sig) for sig in node_events.FORWARDED}
    yield
    signal.set_wakeup_fd(-1)
    for sig, handler in before.items():
        signal.signal(sig, handler)


@pytest.mark.usefixtures("undisturbed")
def test_an_agent_reads_the_kernel_log_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = tmp_path / "kmsg"
    log.write_text(BUS)  # from before the agent was there
    monkeypatch.setattr(node_events, "KernelLog", lambda **options: KernelLog(log, **options))
    monkeypatch.setattr(node_events, "TURN_S", 0.0)
    sent: list[AgentMessage] = []
    loop = Loop()
    events = node_events.NodeEvents(loop, "127.0.0.1", sent.append, lambda: 3)

    def healths() -> list[Health]:
        return [each for each in sent if isinstance(each, Health)]

    loop.turn(0.0)
    assert not healths() and not events.take_gpu_faults()
    with log.open("a") as file:
        file.write(FAULT)
    until = time.monotonic() + 120.0
    while not healths() and time.monotonic() < until:
        loop.turn(0.05)
    (health,) = healths()
    assert (health.generation, health.findings[0].verdict, health.findings[0].check) == (3, "warn", "GPU 0000:86:00")
    assert [each.number for each in events.take_gpu_faults()] == [31]
    assert not events.take_gpu_faults()
    events.hush()
    events.close()
    loop.close()


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    ("number", "gpus", "device"),
    [
        (95, ("0000:3b:00.0", "00000000:86:00.0"), 1),
        (79, ("", "0000:86:00.0"), 1),
        (31, ("0000:3b:00.0", "0000:86:00.0"), None),  # the program's doing
        (95, ("0000:3b:00.0", "0000:87:00.0"), None),  # somebody else's
        (95, (), None),
    ],
)
def test_a_fault_that_needs_a_reset_names_the_device_of_the_rank_that_computes_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, gpus: tuple[str, ...], device: int | None
):
    log = tmp_path / "kmsg"
    log.touch()
    monkeypatch.setattr(node_events, "KernelLog", lambda **options: KernelLog(log, **options))
    monkeypatch.setattr(node_events, "TURN_S", 0.0)
    sent: list[AgentMessage] = []
    loop = Loop()
    events = node_events.NodeEvents(loop, "127.0.0.1", sent.append, lambda: 3, gpus)
    with log.open("a") as file:
        file.write(f"4,1235,9877,-;NVRM: Xid (PCI:0000:86:00): {number}, pid=4242, x\n")
    until = time.monotonic() + 120.0
    while not (found := [each for each in sent if isinstance(each, Health)]) and time.monotonic() < until:
        loop.turn(0.05)
    assert [finding.device for health in found for finding in health.findings] == [device]
    events.hush()
    events.close()
    loop.close()
