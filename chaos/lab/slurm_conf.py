"""The configuration of the lab's Slurm. Pure."""

from collections.abc import Mapping

from chaos.lab.shape import LOGIN, LabPaths, Shape, address

_CGROUP_OFF = (23, 11)  # the version since which Slurm can be told to do without cgroups


def slurm_conf(shape: Shape, place: LabPaths, memory_mib: int) -> str:
    """The text of slurm.conf: one partition for everything, one with a time limit, one that preempts.

    Args:
        memory_mib: that each host has, as Slurm counts it.
    """
    times = shape.times
    directory = place.directory
    settings: Mapping[str, object] = {
        "ClusterName": place.name,
        "SlurmctldHost": f"{LOGIN}({address(LOGIN)})",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={place.munge_socket}",
        "CredType": "cred/munge",
        "SlurmUser": "root",
        "SlurmctldPidFile": directory / "slurmctld.pid",
        "SlurmctldLogFile": place.logs / "slurmctld.log",
        "StateSaveLocation": directory / "slurmctld",
        "SlurmdPidFile": place.spool / "slurmd.pid",
        "SlurmdSpoolDir": place.spool,
        "SlurmdLogFile": place.logs / "slurmd.%n.log",
        "SlurmdParameters": "config_overrides",  # a host may have more CPUs than the machine
        "SlurmdTimeout": times.slurmd_timeout_s,
        "MessageTimeout": times.message_timeout_s,
        "KillWait": times.kill_wait_s,
        "OverTimeLimit": 0,
        "ReturnToService": 2,  # a host that has been down is used again as soon as it answers
        "JobRequeue": 1,
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=1,bf_interval=1",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "AccountingStorageType": "accounting_storage/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MailProg": "/bin/true",
    }
    nodes = [
        f"NodeName={name} NodeAddr={address(name)} CPUs={shape.cpus} RealMemory={memory_mib} State=UNKNOWN" for name in shape.names
    ]
    partitions = [
        f"PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime={times.grace_s} State=UP",
        f"PartitionName=limited Nodes=ALL MaxTime={times.max_time_min} PriorityTier=1 GraceTime={times.grace_s} State=UP",
        "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP",
    ]
    lines = [*(f"{key}={value}" for key, value in settings.items()), *nodes, *partitions]
    return "".join(f"{line}\n" for line in lines)


def cgroup_conf(version: tuple[int, ...]) -> str:
    """The text of cgroup.conf. No cgroup is used, but an older slurmd does not start without one."""
    return "CgroupPlugin=disabled\n" if version >= _CGROUP_OFF else "CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n"
