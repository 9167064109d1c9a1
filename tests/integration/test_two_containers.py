"""Two containers that share the machine's RAM and processes, each with a run directory of its own at the same path."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from campaigns import MOUNTS, Campaign

from resilient.agent import memory


def contained(run: Campaign, place: Path) -> Campaign:
    """The campaign, in a mount namespace in which its directory is at this path."""
    run.within = ["unshare", "--mount", "sh", "-ceu", 'mount --bind "$1" "$2"; cd "$2"; shift 2; exec "$@"', "sh"]
    run.within += [str(run.directory), str(place)]
    return run.start(f"run_dir={place}/run")


@MOUNTS
@pytest.mark.soak
def test_campaigns_of_two_containers_with_one_path_do_not_take_each_others_memory(
    counting: Callable[..., Campaign], tmp_path: Path
):
    place = tmp_path / "place"
    place.mkdir()
    runs = []
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            runs.append(contained(counting(steps=10**6, directory=tmp_path / name), place))
            runs[-1].reach(5)
        places = [memory.region_directories(place / "run", memory.told_nonce(run.run_dir)) for run in runs]
        assert [len(list(directory.glob("g*-rank?"))) for (directory,) in places] == [2, 2]
        assert places[0] != places[1]
        for run in runs:
            run.reach(run.step() + 50)
            run.signal(signal.SIGTERM)
            assert run.wait() == 75, run.output + run.logs()
            assert not run.events("fault")
        assert not memory.directories(place / "run", memory.told_nonce(runs[0].run_dir))
    finally:
        for run in runs:
            run.kill()
