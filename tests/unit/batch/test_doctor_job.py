"""Batch scripts: each trap is named with its line, and a sound script has none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.batch.command import SIZE_BYTES, examine, script_in
from resilient.batch.job import duration_s, read
from resilient.batch.shell import DEEPEST, parse
from resilient.batch.traps import TRAPS, Finding, traps
from resilient.config import load
from resilient.exits import EnvironmentUnusable, Exit
from resilient.slurm.script import script

ROOT = Path(__file__).parents[3]

# In the manner of job scripts for Megatron-LM that are in circulation, with all that goes wrong in them.
TRAPPED = r"""#!/bin/bash
#SBATCH --account=project
#SBATCH --nodes=4
#SBATCH --gres=gpu:4
#SBATCH --time=00:20:00

source /p/project/env/bin/activate
module load GCC CUDA NCCL

export NCCL_IB_TIMEOUT=50
export UCX_RC_TIMEOUT=4s
export NCCL_IB_RETRY_CNT=10

CHECKPOINT_PATH=/p/scratch/run/$SLURM_JOB_ID/checkpoints
EXIT_MINUTES=60

LAUNCHER="python -u -m torchrun_jsc \
    --nproc_per_node 4 \
    --rdzv_backend c10d)"

CMD=" \
    pretrain_gpt.py \
    --exit-duration-in-mins $EXIT_MINUTES \
    --save $CHECKPOINT_PATH \
    "

srun --cpu-bind=none bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee log &
#SBATCH --exclusive
"""
NAMED = {
    ("signal", 1), ("modules", 8), ("range", 10), ("range", 12), ("job id", 14), ("brackets", 17), ("exit duration", 23),
    ("background", 27), ("bad exit", 27), ("late option", 28),
}  # fmt: skip

HEAD = "#!/bin/bash\n#SBATCH --nodes=4 --time=24:00:00\n#SBATCH --signal=B:USR1@300\n"
SRUN = "srun --kill-on-bad-exit=0"

SOUND = {
    "exec": HEAD + "exec resilient run config.yaml\n",
    "behind srun": HEAD + "module load Python\nsource env/bin/activate\nexec srun -K0 --ntasks-per-node=1 python train.py\n",
    "trap and wait": HEAD
    + "child=\nforward() { kill -USR1 $child; }\ntrap forward USR1\n"
    + f'{SRUN} python train.py --save "$SCRATCH/run" &\nchild=$!\nwait $child\nstatus=$?\nwait $child || status=$?\nexit $status\n',
    "steps": "#!/bin/bash -l\n#SBATCH -N 4 -t 1-0\n#SBATCH --signal=USR1@120   # to the steps\nsrun -K0 torchrun --nnodes 4 a.py\n",
    "a loop of servers": "#!/bin/sh\n#SBATCH --signal=TERM@60\n#SBATCH --time=60\n"
    + f"for node in $(scontrol show hostnames $SLURM_JOB_NODELIST); do\n    {SRUN} -w $node -N1 python worker.py &\ndone\nwait\n",
    "a monitor": "#!/bin/bash\n#SBATCH --signal=TERM@60\nexport SLURM_KILL_BAD_EXIT=0\n"
    + "nvidia-smi dmon -s pucm > gpu.log &\npython watch.py &\nsrun python train.py > logs/$SLURM_JOB_ID.txt\n",
    "a here-document": HEAD
    + "cat > hosts.py <<'PY'\nprint('(', \"it's not shell) &\")\nPY\n"
    + "ARGS=(\n    --lr 1e-4   # not too (fast\n    --save $SCRATCH/gpt\n    --exit-duration-in-mins 1400\n)\n"
    + f'exec {SRUN} python train.py "${{ARGS[@]}}" --tensorboard-dir "logs/$SLURM_JOB_ID"\n',
    "the network": HEAD
    + "export NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7\nexport NCCL_DEBUG=WARN\nexport UCX_RC_TIMEOUT=4s\n"
    + "export NCCL_SOCKET_IFNAME=ib0\n"
    + 'export GLOO_SOCKET_IFNAME=${IFACE:-ib0}\nexport NCCL_IB_TIMEOUT=${T:-20}\nexec resilient run "$1"\n',
    "scratch of the job": HEAD
    + "export TMPDIR=/tmp/$SLURM_JOB_ID\nmkdir -p $TMPDIR\nmodule list\n"
    + 'if [[ -z "$1" ]]; then echo "usage: 1) a config (YAML)" >&2; exit 78; fi\n'
    + "exec resilient run $1 checkpoint.tiers.0.path=$TMPDIR\n",
    "a string that is run": "#!/bin/bash\n#SBATCH --time=02:00:00\n#SBATCH --signal=USR1@300\n"
    + 'CMD="python train.py --betas (0.9,0.95) --save /p/scratch/run --exit-duration-in-mins 100"\n'
    + f'{SRUN} bash -c "$CMD --node_rank \\$SLURM_PROCID" 2>&1 | tee -a "logs/${{SLURM_JOB_ID}}.out"\n',
    "a case": HEAD
    + 'case "$1" in\n    small) SIZE=1 ;;\n    *) SIZE=$((2 * 4)) ;;\nesac\n'
    + "timeout 23h true\nexec apptainer exec --nv t.sif python a.py $SIZE\n",
    "a here-document in a substitution": HEAD
    + "CMD=$(cat <<EOF\nit's the (best run\nEOF\n)\nB=\"$(cat <<-'E' | tr a b\n\tisn't \"it\n\tE\n)\"\n"
    + "C=$(tr a b <<< $1; cat < x; cat <(echo))\n"
    + f"N=$((1 << 4)) M=$((B<<(2+(N*2))))\nexec {SRUN} python train.py\n",
    "an exec that is not the last command": HEAD
    + "if true; then\n  exec resilient run config.yaml\nelse\n  echo $SLURM_JOB_ID >> skipped\n  cp train.py $SCRATCH\nfi\n",
}


def named(text: str) -> set[tuple[str, int]]:
    return {(finding.trap, finding.line) for finding in traps(read(text))}


def examined(tmp_path: Path, text: str) -> list[Finding]:
    path = tmp_path / "job.sh"
    path.write_text(text)
    return examine(path, path.read_bytes())


def test_every_trap_of_a_script_in_circulation_is_named_with_its_line(tmp_path: Path):
    found = examined(tmp_path, TRAPPED)
    assert {(each.trap, each.line) for each in found} == NAMED
    assert all(each.found and each.why and each.write for each in found)
    said = {each.line: each.why for each in found}
    assert "acts as 18" in said[10] and "acts as 2" in said[12]


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_named_in_a_sound_script(tmp_path: Path, name: str):
    assert subprocess.run(["bash", "-n"], input=SOUND[name], text=True, check=False).returncode == 0
    assert examined(tmp_path, SOUND[name]) == []


def test_nothing_is_named_in_what_submit_writes(tmp_path: Path):
    path = tmp_path / "config.yaml"
    keys = "name: x\nentrypoint: a:b\ncluster: {nodes: 2, procs_per_node: 1, device: cpu}\n"
    path.write_text(f"{keys}slurm: {{time_min: 60, modules: [GCC], setup: ['. v/bin/activate']}}\n")
    text = script(load(path, []), tmp_path, arguments=["c.yaml"], python="/usr/bin/python3", directory=tmp_path)
    assert examined(tmp_path, text) == []


SIGNAL = "#!/bin/sh\n#SBATCH --signal=USR1@60\n#SBATCH --time=30\n"
CASES = {
    "a quote": (SIGNAL + "srun -K0 python 'train.py\necho\n", ("quotes", 4)),
    "a double quote": (SIGNAL + 'A=1\nsrun -K0 python "train.py\n', ("quotes", 5)),
    "an array": (SIGNAL + "ARGS=(--a 1\nsrun -K0 python train.py\n", ("quotes", 4)),
    "a substitution": (SIGNAL + "A=$(hostname\nsrun -K0 python train.py\n", ("quotes", 4)),
    "a stray bracket": (SIGNAL + "A=1\nsrun -K0 python train.py )\n", ("syntax", 5)),
    "a loop without an end": (SIGNAL + "for i in 1 2; do\nsrun -K0 python train.py\n", ("syntax", 6)),
    "a command in quotes": (SIGNAL + 'srun -K0 bash -c "python train.py (a"\n', ("brackets", 4)),
    "work in the background": (SIGNAL + "srun -K0 python train.py &\necho started\n", ("background", 4)),
    "a list in the background": (SIGNAL + "cd /x && srun -K0 python train.py &\n", ("background", 4)),
    "wait too early": (SIGNAL + "wait\nsrun -K0 python train.py &\n", ("background", 5)),
    "a run directory": (SIGNAL + "exec resilient run c.yaml run_dir=runs/$SLURM_JOBID\n", ("job id", 4)),
    "a variable": (SIGNAL + "OUT=/scratch/${SLURM_JOB_ID}\nsrun -K0 python t.py --checkpoint-dir=$OUT/x\n", ("job id", 5)),
    "an array's option": (
        SIGNAL + "A=(\n  --lr 1\n  --output_dir /s/$SLURM_ARRAY_JOB_ID\n)\nsrun -K0 python t.py ${A[@]}\n",
        ("job id", 6),
    ),
    "as long as the job": (SIGNAL + "srun -K0 python t.py --exit-duration-in-mins=30\n", ("exit duration", 4)),
    "timeout": (SIGNAL + "timeout -s INT 1h srun -K0 python t.py\n", ("exit duration", 4)),
    "a variable of srun": (SIGNAL + "srun -K0 --export=ALL,NCCL_IB_TIMEOUT=23 python t.py\n", ("range", 4)),
    "a variable of env": (SIGNAL + "env NCCL_IB_RETRY_CNT=8 srun -K0 python t.py\n", ("range", 4)),
    "a variable before": (SIGNAL + "NCCL_DEBUG=LOUD srun -K0 python t.py\n", ("range", 4)),
    "no signal": ("#!/bin/sh\nexec resilient run c.yaml\n", ("signal", 1)),
    "a signal that nobody passes on": ("#!/bin/sh\n#SBATCH --signal=B:USR1@60\nresilient run c.yaml\n", ("signal", 2)),
    "a signal that is no such": ("#!/bin/sh\n#SBATCH --signal=B:USR1@soon\nexec resilient run c.yaml\n", ("signal", 2)),
    "a signal before the job": ("#!/bin/sh\n#SBATCH -t 5 --signal=USR1@600\nexec resilient run c.yaml\n", ("signal", 2)),
    "srun": (SIGNAL + "srun --ntasks-per-node=1 python t.py\n", ("bad exit", 4)),
    "srun with -K1": (SIGNAL + "srun -K1 python t.py\n", ("bad exit", 4)),
    "a shift": (SIGNAL + "N=4\n(( BATCH = 1 << N ))\nsrun python t.py\n", ("bad exit", 6)),
    "a shift in a loop": (SIGNAL + "for ((i = (1 << 2); i << 9; i++)); do\nsrun python t.py\ndone\n", ("bad exit", 5)),
    "brackets in brackets": (SIGNAL + "((cd a; cat <<A); (srun python t.py))\nsrun -K0 python t.py '(\nA\n", ("bad exit", 4)),
    "a substitution behind a shift": (SIGNAL + "A=$((2 << 1))$(cat <<B\n(\nB\n)\nsrun python t.py\n", ("bad exit", 8)),
    "conda": (SIGNAL + "conda activate x\nml GCC\nexec resilient run c.yaml\n", ("modules", 5)),
    "an option that is too late": (SIGNAL + "exec resilient run c.yaml\n#SBATCH --mem=0\n", ("late option", 5)),
    "lines of Windows": (SIGNAL.replace("\n", "\r\n") + "exec resilient run c.yaml\r\n", ("line ends", 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_trap_is_named_alone(tmp_path: Path, name: str):
    text, expected = CASES[name]
    (tmp_path / "job.sh").write_bytes(text.encode())
    assert [(each.trap, each.line) for each in examine(tmp_path / "job.sh", (tmp_path / "job.sh").read_bytes())] == [expected]


def test_every_trap_has_a_case():
    told = {trap for _, (trap, _) in CASES.values()}
    assert told == {name for name, _ in NAMED} | {"quotes", "syntax", "line ends"}
    assert all(any(list(trap(read(text))) for text in (TRAPPED, *(text for text, _ in CASES.values()))) for trap in TRAPS)
    rows = (ROOT / "docs" / "doctor.md").read_text()
    assert all(f"| `{trap}` |" in rows for trap in told)


@given(st.text(alphabet="ab \n\t\\'\"`$(){}[]<>|&;#=!*-/1é", max_size=200))
def test_any_text_is_read_to_its_end_and_lines_are_within_it(text: str):
    found = parse(text)
    lines = text.count("\n") + 1
    assert all(1 <= word.line <= lines for command in found.commands for word in command.words)
    assert all(1 <= finding.line <= lines for finding in traps(read(text)))


@given(st.lists(st.sampled_from(["A=$A$A", "A+=$B", "B=$A", "export A=${B:-$A}", "srun $A --save $B"]), max_size=25))
def test_variables_in_variables_come_to_an_end(lines: list[str]):
    traps(read("\n".join(lines)))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("5:30", 330), ("01:00:00", 3600), ("1-0", 86400), ("2-12:30", 217800), ("UNLIMITED", None), ("x", None)],
)
def test_times_are_read_as_sbatch_reads_them(text: str, seconds: float | None):
    assert duration_s(text) == seconds


def test_nothing_of_a_script_is_run(tmp_path: Path):
    witness = tmp_path / "witness"
    examined(tmp_path, f"#!/bin/bash\ntouch {witness}\nA=$(touch {witness})\n: ${{B:=`touch {witness}`}}\n")
    assert not witness.exists()


def test_the_command_names_them_and_says_so_by_its_exit_code(tmp_path: Path):
    def doctor(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "resilient", "doctor", *map(str, words)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=tmp_path)

    (tmp_path / "good.sh").write_text(SOUND["exec"])
    (tmp_path / "bad").write_text(TRAPPED)
    good, bad = doctor("good.sh"), doctor("bad", "--json")
    assert (good.returncode, good.stdout) == (0, "no trap is known in good.sh\n")
    told = json.loads(bad.stdout)
    assert (bad.returncode, told["ok"], len(told["findings"])) == (78, False, len(NAMED))
    shown = doctor("bad")
    assert "bad:27: background: srun" in shown.stdout or "bad:27: background: tee" in shown.stdout
    assert "write: " in shown.stdout and f"{len(NAMED)} traps in bad" in shown.stdout
    assert doctor("gone.sh").returncode == 69


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_words_of_a_script_and_its_name_are_told_as_they_are(tmp_path: Path, encoding: str):
    (tmp_path / ":key:[red].sh").write_text("#!/bin/bash\nsrun python train.py --tag :key: ü\n", encoding="utf-8")
    command = [sys.executable, "-m", "resilient", "doctor", ":key:[red].sh"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    told, shown = (
        subprocess.run([*command, *words], env=environ, capture_output=True, encoding=encoding, check=False, cwd=tmp_path).stdout
        for words in (["--json"], [])
    )
    assert "srun python train.py --tag :key: ü" in [each["found"] for each in json.loads(told)["findings"]]
    assert shown.endswith(" traps in :key:[red].sh\n")


def test_what_is_no_script_is_none(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("name: x\n")
    assert script_in(tmp_path / "c.yaml") is None and script_in(tmp_path / "missing.yaml") is None and script_in(tmp_path) is None
    with pytest.raises(EnvironmentUnusable, match=r"missing\.sh cannot be read: No such file"):
        script_in(tmp_path / "missing.sh")
    (tmp_path / "huge.sh").write_bytes(b"#" * (SIZE_BYTES + 1))
    with pytest.raises(EnvironmentUnusable, match="is no batch script"):
        examine(tmp_path / "huge.sh", script_in(tmp_path / "huge.sh") or b"")


@pytest.mark.parametrize(
    "line",
    ["$DOCTOR /dev/stdin < bad", "cat bad | $DOCTOR /dev/stdin", "$DOCTOR <(cat bad)"],
    ids=["redirected", "piped", "substituted"],
)
def test_a_script_that_comes_by_a_pipe_is_read_once_and_whole(tmp_path: Path, line: str):
    (tmp_path / "bad").write_text(TRAPPED + "#" * (1 << 17))  # more than a pipe holds
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DOCTOR": f"{sys.executable} -m resilient doctor --json"}
    done = subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, len(json.loads(done.stdout)["findings"])) == (78, len(NAMED)), done.stderr


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("job.sh", 69, "resilient: {path} cannot be read: it is a pipe that nobody writes to\n"),
        ("job", 78, "{path}: is a named pipe; allowed: a regular file with YAML\n"),
    ],
)
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path, name: str, code: int, says: str):
    os.mkfifo(path := tmp_path / name)
    command = [sys.executable, "-m", "resilient", "doctor", str(path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", says.format(path=path))


NESTED = {  # what is before it, opened and closed; how many of DEEPEST that is
    "quotes": ("echo ", '"$(', ')"', 2),
    "arrays": ("", "a=(", ")", 1),
    "processes": ("cat ", '<(a "$(', ')")', 3),
}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("closed", [True, False])
def test_a_script_that_is_nested_deeper_than_any_is_refused_in_a_line(tmp_path: Path, kind: str, closed: bool):
    before, opened, end, _ = NESTED[kind]
    path = tmp_path / "deep.sh"
    path.write_text("#!/bin/bash\n" + before + 400 * opened + (400 * end if closed else "") + "\n")
    command = [sys.executable, "-m", "resilient", "doctor", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == Exit.UNUSABLE, done.stderr
    assert done.stderr == f"resilient: {path} cannot be read: quotes and brackets stand more than {DEEPEST} deep in each other\n"


@pytest.mark.parametrize("kind", NESTED)
def test_what_is_nested_as_deep_as_may_be_is_read(kind: str):
    before, opened, end, depth = NESTED[kind]
    levels = (DEEPEST - 1) // depth
    assert parse(before + levels * opened + levels * end + "\n").unclosed == []
