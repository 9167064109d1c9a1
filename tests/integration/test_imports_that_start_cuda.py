"""Packages that start CUDA while they are imported: what they have started is of no use in processes that are forked from there."""

import os
from collections.abc import Callable
from pathlib import Path

from campaigns import ROOT, Campaign

PACKAGE = """
import os
import torch

PROCESS = os.getpid()
torch.cuda._initialized = {started}
"""

SCRIPT = """
import os, pathlib, sys
import torch
import first, starts_cuda, last

assert starts_cuda.PROCESS == os.getpid(), "Cannot re-initialize CUDA in forked subprocess"
assert last.PROCESS == os.getpid()
model, once = torch.nn.Linear(1, 1), pathlib.Path(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
print("trained", "with it imported ahead" if first.PROCESS != os.getpid() else "alone")
if not once.exists():
    once.touch()
    os._exit(3)
"""


def test_a_package_that_starts_cuda_is_imported_by_the_ranks_and_those_before_it_ahead(
    campaign: Callable[..., Campaign], tmp_path: Path
):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for name in ("first", "starts_cuda", "last"):
        started = "True" if name == "starts_cuda" else "torch.cuda._initialized"
        (installed / f"{name}.py").write_text(PACKAGE.format(started=started))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = campaign(
        entrypoint=f"{script} {tmp_path / 'once'}", cluster={"procs_per_node": 1, "threads_per_proc": 1, "device": "cpu"}
    )
    run.within = ["env", f"PYTHONPATH={os.pathsep.join(map(str, (installed, ROOT)))}"]
    assert run.run() == 0, run.output + run.logs()
    assert run.logs().count("trained with it imported ahead") == 2, run.logs()
    assert "importing starts_cuda has started CUDA" in (run.run_dir / "logs/agent0.log").read_text()
    assert len(run.events("generation_started")) == 2
