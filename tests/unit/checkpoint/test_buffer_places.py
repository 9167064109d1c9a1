"""Where a node's buffers lie: real directories, some of which are a file, others' to write in, or not mounted any more."""

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from mounts import needs_root

from checkpoint import safe_dir
from checkpoint.daemon.buffer_places import BufferPlaces
from checkpoint.daemon.mounts import Mounts
from checkpoint.protocol import DaemonSettings, TierSettings
from checkpoint.tiers.lease import buffer_path

Make = Callable[..., BufferPlaces]


@pytest.fixture
def make(base: Path, tmp_path: Path) -> Make:
    """The places `ram` and `disk` of a node, as a daemon has them that starts now."""

    def places(*, durable: Path | None = None) -> BufferPlaces:
        own = tmp_path
        safe_dir.make_private(own)
        roots = (base / "ram", base / "disk")
        tiers = (TierSettings(name="gpfs", durable=True, path=str(durable), keep_last=1),) if durable else ()
        settings = DaemonSettings(
            generation=1,
            node=0,
            host="127.0.0.1",
            keys={},
            directory=str(own),
            memory="ram",
            places=tuple(str(root) for root in roots),
            buffers=2,
            tiers=tiers,
        )
        return BufferPlaces(settings, Mounts(own, "job", roots))

    return places


def had_buffers(place: Path) -> Path:
    """An earlier daemon had its buffers there, the second of two is left."""
    safe_dir.make_private(place)
    buffer_path(place, 1).mkdir()
    return place


def test_the_first_place_is_taken(make: Make, base: Path) -> None:
    places = make()
    assert places.open().root == base / "ram"
    assert not (base / "disk").exists()
    assert places.left(base / "ram") == []


def test_a_place_that_cannot_be_used_is_passed_over(make: Make, base: Path, caplog: pytest.LogCaptureFixture) -> None:
    (base / "ram").write_text("a file")
    places = make()
    assert places.open().root == base / "disk"
    assert f"no buffers in {base / 'ram'}: " in caplog.text
    assert places.left(base / "disk") == [], "what is not a directory of ours is nothing that was left"


@pytest.mark.parametrize("known", [True, False])
def test_a_place_that_answers_with_an_error_is_passed_over(make: Make, base: Path, known: bool) -> None:
    """Args: known: a daemon before this one has seen it well."""
    if known:
        make()
    (base / "ram").symlink_to("x" * 300)  # whatever is below it: ENAMETOOLONG
    places = make()
    assert places.open().root == base / "disk"
    assert places.left(base / "disk") == []


def test_buffers_stay_where_an_earlier_daemon_had_them(make: Make, base: Path) -> None:
    safe_dir.make_private(base / "ram")
    had_buffers(base / "disk")
    places = make()
    assert places.open().root == base / "disk"
    assert places.left(base / "disk") == [base / "ram"], "a daemon before that one may have left shards in the faster place"


def test_buffers_that_others_could_have_changed_are_not_taken_over(make: Make, base: Path) -> None:
    had_buffers(base / "disk").chmod(0o777)
    assert make().open().root == base / "ram"


def test_below_a_durable_tier_the_owner_of_its_parents_is_the_users_choice(make: Make, base: Path, tmp_path: Path) -> None:
    base.chmod(0o777)
    (base / "disk").mkdir(mode=0o700)
    assert make().open().root == tmp_path / "own", "both places are in a directory that anybody may write in"
    places = make(durable=base / "disk")
    assert places.open().root == base / "disk"
    assert places.trusted(base / "disk" / "node-0") == base / "disk"
    assert places.trusted(base / "ram") is None


def test_without_any_place_buffers_are_the_daemons_own_and_nothing_is_slower(make: Make, base: Path, tmp_path: Path) -> None:
    for each in ("ram", "disk"):
        (base / each).write_text("a file")
    places = make()
    root = places.open().root
    assert root == tmp_path / "own"
    assert places.slower(root) == []


def test_slower_are_the_places_behind_one(make: Make, base: Path) -> None:
    places = make()
    assert places.slower(base / "ram") == [base / "disk"]
    assert places.slower(base / "disk") == []


def test_what_was_left_is_cleared_and_where_the_buffers_are_is_not(make: Make, base: Path) -> None:
    places = make()
    places.open()
    had_buffers(base / "ram")
    had_buffers(base / "disk")
    places.leave(base / "ram")
    places.leave(base / "ram")
    assert places.left(base / "disk") == [base / "ram"]
    asyncio.run(places.clear(base / "disk"))
    assert not (base / "ram").exists()
    assert buffer_path(base / "disk", 1).is_dir()


def test_a_place_that_the_buffers_came_back_to_is_not_cleared(make: Make, base: Path) -> None:
    places = make()
    places.open()
    had_buffers(base / "ram")
    had_buffers(base / "disk")
    places.leave(base / "ram")
    places.leave(base / "disk")
    asyncio.run(places.clear(base / "ram"))
    assert buffer_path(base / "ram", 1).is_dir()
    assert not (base / "disk").exists()


@needs_root
def test_no_buffers_are_made_below_a_mount_point_that_lost_its_file_system(make: Make, base: Path) -> None:
    ram = base / "ram"
    ram.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", ram], check=True)
    try:
        places = make()
    finally:
        subprocess.run(["umount", "--lazy", ram], check=True)
    assert places.open().root == base / "disk"
    with pytest.raises(FileNotFoundError, match="not mounted any more"):
        places.make(ram)
    assert list(ram.iterdir()) == []
