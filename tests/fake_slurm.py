"""sbatch, squeue, scancel and scontrol in one program, with a queue in a file: the texts are those of Slurm 22.05.

`STATE/queue.json` holds the jobs, `STATE/reservations` the lines on reservations, `STATE/preemption` the PreemptType, and the
PreemptMode of the cluster, of its partitions and of its QOS; as long as `STATE/deaf` names a number above
nought, calls fail with the words in `STATE/complaint` and count it down; where `STATE/lossy` exists, sbatch submits, removes it,
and fails all the same; where `STATE/few` exists, no job is to be had that excludes a node, and one that waits and is told to do so
never begins; where `STATE/private` exists, squeue shows nobody the jobs of others, as `PrivateData=jobs` has it.
"""

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

STATE = Path(os.environ["FAKE_SLURM"])
WIDTHS = (32, 24, 24, 24, 24, 48)


def option(arguments: list[str], name: str) -> str:
    for index, word in enumerate(arguments):
        if word == name:
            return arguments[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""


def main(program: str, arguments: list[str], queue: list[dict[str, Any]]) -> None:
    match program:
        case "sbatch":
            script = Path(arguments[-1]).read_text()
            name = next(line.partition("=")[2] for line in script.splitlines() if line.startswith("#SBATCH --job-name="))
            name = os.environ.get("SBATCH_JOB_NAME", name)  # wins over the script
            number = str(100 + len(queue))
            job = {"id": number, "name": name, "state": "PENDING", "end": "N/A", "script": arguments[-1], "user": os.getuid()}
            without = option(arguments, "--exclude")
            if without and (STATE / "few").exists():
                said = "allocation failure" if "--test-only" in arguments else "sbatch: error: Batch job submission failed"
                sys.exit(f"{said}: Requested node configuration is not available")
            if "--test-only" in arguments:
                print(f"sbatch: Job {number} to start at 2026-11-30T11:23:45 on nodes n1 in partition lab", file=sys.stderr)
                return
            queue.append({**job, "dependency": option(arguments, "--dependency"), "exclude": without})
            if (STATE / "lossy").exists():
                (STATE / "lossy").unlink()
                save(queue)
                sys.exit("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
            print(number)
        case "squeue":
            wanted, name = option(arguments, "--jobs"), option(arguments, "--name")
            found = [job for job in queue if job["id"] == wanted or job["name"] == name]
            users = option(arguments, "--user").split(",") if "--me" not in arguments else [str(os.getuid())]
            found = [job for job in found if users == [""] or str(job.get("user", os.getuid())) in users]
            found = [job for job in found if not (STATE / "private").exists() or job.get("user", os.getuid()) == os.getuid()]
            if wanted and not found:
                sys.exit("slurm_load_jobs error: Invalid job id specified")
            if option(arguments, "--format") == "%N":
                print("\n".join(job.get("nodes", "") for job in found))
                return
            for job in found:
                if job["state"] not in ("CANCELLED", "COMPLETED") or wanted:
                    times = (job["end"], job.get("preempt", "N/A"), job.get("start", "N/A"))
                    words = (job["id"], job["state"], *times, job.get("reason", "Dependency"))
                    print("".join(f"{word:<{width}}" for word, width in zip(words, WIDTHS, strict=True)))
        case "scancel":
            for job in queue:
                if job["id"] == arguments[-1]:
                    sent = option(arguments, "--signal")
                    job["state"] = job["state"] if sent else "CANCELLED"
                    job["signals"] = [*job.get("signals", []), *([sent] if sent else [])]
        case "scontrol" if arguments[0] == "update":
            told = dict(word.split("=", 1) for word in arguments[1:])
            for job in queue:
                if job["id"] == told["JobId"]:
                    few = told["ExcNodeList"] and (STATE / "few").exists()
                    job |= {"exclude": told["ExcNodeList"], "reason": "BadConstraints" if few else "Dependency"}
        case "scontrol" if arguments[0] == "requeue":
            for job in queue:
                if job["id"] == arguments[1]:
                    job["state"] = "PENDING"
        case "scontrol" if arguments[1:3] == ["show", "job"]:
            for job in queue:
                if job["id"] == arguments[-1]:
                    told = {"JobId": job["id"], "JobState": job["state"], "NodeList": job.get("nodes", "n1"), "BatchHost": "n1"}
                    told |= {"Requeue": job.get("requeue", "0"), "Restarts": job.get("restarts", "0")}
                    print(*(f"{key}={value}" for key, value in told.items()))
        case "scontrol" if "reservation" in arguments:
            told = STATE / "reservations"
            print(told.read_text() if told.exists() else "No reservations in the system")
        case "scontrol" if "partition" in arguments:
            print(f"PartitionName={arguments[-1]} GraceTime=30 PreemptMode={preemption()[2]} State=UP")
        case "sacctmgr":
            print(preemption()[3])
        case "scontrol":
            print(f"PreemptMode             = {preemption()[1]}\nPreemptType             = {preemption()[0]}")
            print("ClusterName             = here\nKillOnBadExit           = 0\nKillWait                = 42 sec")


def preemption() -> list[str]:
    told = STATE / "preemption"
    return told.read_text().split() if told.exists() else ["preempt/none", "REQUEUE", "REQUEUE", "cluster"]


def save(queue: list[dict[str, Any]]) -> None:
    (STATE / "queue.json").write_text(json.dumps(queue))


if __name__ == "__main__":
    if Path(sys.argv[0]).name == "srun":  # every node is this machine
        if "sh" in sys.argv:
            os.execv("/bin/sh", sys.argv[sys.argv.index("sh") :])
        os.environ["SLURMD_NODENAME"] = option(sys.argv, "--nodelist")  # a step of one node
        os.execv(sys.executable, [sys.executable, *sys.argv[sys.argv.index("-m") :]])
    with (STATE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        deaf = STATE / "deaf"
        if deaf.exists() and int(deaf.read_text()) > 0:
            deaf.write_text(str(int(deaf.read_text()) - 1))
            sys.exit((STATE / "complaint").read_text())
        jobs = json.loads((STATE / "queue.json").read_text())
        main(Path(sys.argv[0]).name, sys.argv[1:], jobs)
        save(jobs)
