"""`resilient logs`: which lines it shows, in which order, and what it says where there are none."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from resilient import ledger
from resilient.cli import app
from resilient.exits import Exit
from resilient.logs import packing
from resilient.logs.command import LOOKED_AT
from resilient.logs.reading import LATE_S, Follower, Wanted
from resilient.logs.since import point
from resilient.main import guarded

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two generations of two nodes with two ranks each, and older ones that are packed."""
    (tmp_path / ledger.EVENTS).touch()
    for generation in range(1, 5):
        folder = tmp_path / "logs" / f"g{generation}"
        folder.mkdir(parents=True)
        for node in range(2):
            lines = [
                f"2026-01-31 12:0{generation}:{10 * number + 5 * node + rank % 2:02}.000 [rank {rank}] {generation} {number}\n"
                for number in range(3)
                for rank in (2 * node, 2 * node + 1)
            ]
            (folder / f"node{node}.log").write_text("".join(lines))
    (tmp_path / "logs" / "g4" / "nccl_trace_rank_0").write_bytes(b"\x80 no text")
    packing.pack_folders(tmp_path / "logs", packing.Rule(folders=2, files=1000))
    return tmp_path


@pytest.fixture
def command(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `resilient logs`: exit code, output and errors."""

    def run(*words: str, where: Path | None = None) -> tuple[int, str, str]:
        try:
            code = guarded(lambda: app(["logs", str(where or run_dir), *words], standalone_mode=True))
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def texts(out: str) -> list[str]:
    return [line.split("] ", 1)[0].split("[")[1] + ": " + line.split("] ", 1)[1] for line in out.splitlines()]


def test_the_newest_generation_is_shown_with_the_lines_of_all_ranks_by_their_times(command: Command):
    code, out, _ = command()
    assert code == 0
    assert texts(out) == [f"rank {rank}: 4 {number}" for number in range(3) for rank in range(4)]
    assert out.splitlines()[0] == "2026-01-31 12:04:00.000 [rank 0] 4 0"


@pytest.mark.parametrize("generation", [1, 3], ids=["packed", "plain"])
def test_a_rank_a_node_and_a_generation_can_be_asked_for(command: Command, generation: int):
    _, out, _ = command("--rank", "3", "--generation", str(generation))
    assert texts(out) == [f"rank 3: {generation} {number}" for number in range(3)]
    _, out, _ = command("--node", "1", "--generation", str(generation))
    assert {text.partition(":")[0] for text in texts(out)} == {"rank 2", "rank 3"}


def test_lines_from_a_point_in_time_on(command: Command):
    _, out, _ = command("--since", "2026-01-31 12:04:20", "--rank", "0")
    assert texts(out) == ["rank 0: 4 2"]
    code, _, err = command("--since", "soon")
    assert code == 2
    assert "10m" in err and "14:30" in err


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("90s", "2026-01-31 11:58:30"),
        ("1.5h", "2026-01-31 10:30:00"),
        ("2d", "2026-01-29 12:00:00"),
        ("09:15", "2026-01-31 09:15:00"),
        ("2026-01-30", "2026-01-30 00:00:00"),
        ("2026-01-30T08:00:01", "2026-01-30 08:00:01"),
    ],
)
def test_points_in_time(text: str, found: str):
    assert str(point(text, datetime(2026, 1, 31, 12))) == found


def test_what_is_not_there_is_told_with_what_is(command: Command, tmp_path: Path):
    code, _, err = command("--generation", "9")
    assert code == 69
    assert "no logs of generation 9" in err and "there are those of 1 to 4" in err
    code, out, err = command("--rank", "17")
    assert (code, out) == (0, "")
    assert "generation 4 has no such lines" in err
    started = {"t": 1.0, "host": "n0", "event": "generation_started", "nodes": ["n0", "n1"], "world_size": 4, "resumed_step": None}
    (tmp_path / ledger.EVENTS).write_text(
        f"{json.dumps({**started, 'generation': 3})}\n{json.dumps({**started, 'generation': 4})}\n"
    )
    code, out, err = command("--rank", "17")
    assert (code, out) == (0, "")
    assert "generation 4 has no such lines, for its ranks are 0 to 3" in err
    _, _, err = command("--rank", "3", "--since", "2026-01-31 13:00")
    assert "generation 4 has no such lines" in err and "for its ranks" not in err
    code, _, err = command(where=tmp_path / "nope")
    assert code == 69
    assert f"there is no directory {tmp_path}/nope" in err
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ledger.EVENTS).touch()
    code, _, err = command(where=tmp_path / "empty")
    assert code == 69
    assert "nothing has been started yet" in err


def said_by_rank(run_dir: Path, generation: int, rank: int) -> None:
    folder = run_dir / "logs" / f"g{generation}"
    folder.mkdir(exist_ok=True)
    (folder / "node0.log").write_text(f"2026-01-31 12:{generation:02}:00.000 [rank {rank}] {generation} 0\n")


def test_after_a_restart_what_a_rank_has_printed_is_that_of_the_newest_generation_with_lines_of_it(run_dir: Path, command: Command):
    said_by_rank(run_dir, 5, 0)  # rank 1 has printed nothing yet
    code, out, err = command("--rank", "1")
    assert (code, texts(out)) == (0, [f"rank 1: 4 {number}" for number in range(3)])
    assert err == "resilient: generation 5 has no such lines; these are of generation 4\n"
    code, out, err = command("--rank", "1", "--since", "2026-01-31 12:07")  # nobody has
    assert (code, out) == (0, "")
    assert err == "resilient: generation 5 has no such lines, nor were any found in the 4 others that were looked at\n"


def test_of_a_generation_that_is_asked_for_no_other_is_shown_but_named(run_dir: Path, command: Command):
    said_by_rank(run_dir, 5, 0)
    code, out, err = command("--rank", "1", "--generation", "5")
    assert (code, out) == (0, "")
    assert err == "resilient: generation 5 has no such lines; generation 4 has some: --generation 4\n"
    (run_dir / "logs" / "g0001-g0100.tar.zst").write_bytes(b"damaged")  # it costs nothing that is not in it
    assert command("--rank", "1") == (
        0,
        command("--rank", "1", "--generation", "4")[1],
        err.partition(";")[0] + "; these are of generation 4\n",
    )


def test_only_so_many_generations_are_looked_at(run_dir: Path, command: Command):
    for generation in range(5, 5 + LOOKED_AT):
        said_by_rank(run_dir, generation, 0)
    assert command("--rank", "1")[1] == ""
    (run_dir / "logs" / "g5" / "node1.log").write_text("2026-01-31 12:05:00.000 [rank 1] here\n")
    assert texts(command("--rank", "1")[1]) == ["rank 1: here"]


def test_where_there_is_one_other_generation_it_is_told_as_one(tmp_path: Path, command: Command):
    (tmp_path / "two" / "logs").mkdir(parents=True)
    (tmp_path / "two" / ledger.EVENTS).touch()
    for generation in (1, 2):
        said_by_rank(tmp_path / "two", generation, 0)
    err = command("--rank", "1", where=tmp_path / "two")[2]
    assert err == "resilient: generation 2 has no such lines, nor were any found in the one other that was looked at\n"


def said_at_length(run_dir: Path, generation: int, size_bytes: int) -> Path:
    """Rank 0 has printed so much, at 12:00."""
    folder = run_dir / "logs" / f"g{generation}"
    folder.mkdir()
    line = f"2026-01-31 12:00:00.000 [rank 0] {'x' * 966}\n"
    (folder / "node0.log").write_text(line * (size_bytes // len(line)))
    return folder / "node0.log"


def read_bytes() -> int:
    """What this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(
    ("words", "limit_bytes"),
    [(["--rank", "1"], 64 << 10), (["--since", "2026-01-31 12:30"], 1 << 30)],
    ids=["of a rank", "since the last line of each"],
)
def test_of_generations_that_were_not_asked_for_little_is_read(
    run_dir: Path, command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str], limit_bytes: int
):
    monkeypatch.setattr("resilient.logs.command.LOOK_BYTES", limit_bytes)
    for generation in range(5, 4 + LOOKED_AT):
        log = said_at_length(run_dir, generation, 1 << 20)
        written_t = datetime(2026, 1, 31, 12).timestamp()
        os.utime(log, (written_t, written_t))
    said_by_rank(run_dir, 4 + LOOKED_AT, 0)
    for _ in range(2):  # what is imported is read by the first one
        before = read_bytes()
        code, out, err = command(*words)
    assert (code, out, err.count("19 others")) == (0, "", 1)
    assert read_bytes() - before < 4 << 20


@pytest.mark.parametrize("where", ["beginning", "end"])
def test_what_a_large_generation_has_at_its_beginning_or_its_end_is_found(
    run_dir: Path, command: Command, monkeypatch: pytest.MonkeyPatch, where: str
):
    monkeypatch.setattr("resilient.logs.command.LOOK_BYTES", 4 << 10)
    log = said_at_length(run_dir, 5, 64 << 10)
    one = "2026-01-31 12:00:00.000 [rank 1] here\n"
    log.write_text(one + log.read_text() if where == "beginning" else log.read_text() + one)
    said_by_rank(run_dir, 6, 0)
    assert texts(command("--rank", "1", "--since", "2026-01-31 12:00")[1]) == ["rank 1: here"]


def test_of_a_large_packed_generation_that_was_not_asked_for_nothing_is_read(
    run_dir: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("resilient.logs.command.LOOK_BYTES", 4 << 10)
    said_at_length(run_dir, 5, 64 << 10)
    said_by_rank(run_dir, 6, 0)
    packing.pack_folders(run_dir / "logs", packing.Rule(folders=1, files=1000))
    err = command("--rank", "17")[2]
    assert err == "resilient: generation 6 has no such lines, nor were any found in the 4 others that were looked at\n"


def test_following_goes_on_with_what_comes_and_into_the_next_generation_until_ctrl_c(run_dir: Path):
    words = [sys.executable, "-m", "resilient", "logs", str(run_dir), "--rank", "1", "--follow"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().split("] ")[1] for _ in range(3)] == ["4 0\n", "4 1\n", "4 2\n"]
        with (run_dir / "logs" / "g4" / "node0.log").open("a") as log:
            log.write("2026-01-31 12:05:00.000 [rank 0] not this\n2026-01-31 12:05:00.000 [rank 1] in ")
            log.flush()
            log.write("two\n")
        assert process.stdout.readline() == "2026-01-31 12:05:00.000 [rank 1] in two\n"
        (run_dir / "logs" / "g5").mkdir()
        (run_dir / "logs" / "g5" / "node0.log").write_text("2026-01-31 12:06:00.000 [rank 1] new\n")
        assert process.stdout.readline() == "2026-01-31 12:06:00.000 [rank 1] new\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        assert process.stderr is not None and process.stderr.read() == ""


def test_what_comes_late_to_the_generation_before_is_shown_for_a_minute(run_dir: Path):
    """As the traceback of the rank that ended it."""
    now = 0.0
    follower = Follower(run_dir, Wanted(rank=1), None, lambda: now)
    assert [line[-3:] for line in follower.more()] == ["4 0", "4 1", "4 2"]

    def said(generation: int, number: int) -> None:
        (run_dir / "logs" / f"g{generation}").mkdir(exist_ok=True)
        with (run_dir / "logs" / f"g{generation}" / "node0.log").open("a") as log:
            log.write(f"2026-01-31 12:06:0{number}.000 [rank 1] {generation} {number}\n")

    for generation in (5, 6):  # 5 is over before anybody has looked
        said(generation, 0)
    assert [line[-3:] for line in follower.more()] == ["5 0", "6 0"]
    for generation in (4, 5, 6):
        said(generation, 1)
    now = LATE_S  # what has come until then is shown, too
    assert [line[-3:] for line in follower.more()] == ["4 1", "5 1", "6 1"]
    for generation in (4, 5, 6):
        said(generation, 2)
    assert [line[-3:] for line in follower.more()] == ["6 2"]


# In a process of its own, where nobody else allocates memory.
PEAK = """
import sys, tracemalloc
from pathlib import Path
from resilient.logs.reading import Follower, Wanted
follower = Follower(Path(sys.argv[1]), Wanted(since="2099"), None)
tracemalloc.start()
assert list(follower.more()) == []
print(tracemalloc.get_traced_memory()[1])
"""


def test_following_a_long_log_keeps_little_of_it_in_memory(run_dir: Path):
    line = f"2026-01-31 12:05:00.000 [rank 1] {'x' * 1000}\n"
    with (run_dir / "logs" / "g4" / "node0.log").open("a") as log:
        log.writelines(line for _ in range((32 << 20) // len(line)))
    done = subprocess.run([sys.executable, "-c", PEAK, str(run_dir)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1 << 20


def test_a_reader_that_has_gone_ends_the_following_without_a_word(run_dir: Path):
    words = [sys.executable, "-m", "resilient", "logs", str(run_dir), "--rank", "1", "--follow"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert [process.stdout.readline().split("] ")[1] for _ in range(3)] == ["4 0\n", "4 1\n", "4 2\n"]
        process.stdout.close()  # as `head` does
        with (run_dir / "logs" / "g4" / "node0.log").open("a") as log:
            log.write("2026-01-31 12:05:00.000 [rank 1] more\n")
        assert process.stderr.read() == "" and process.wait() == 1


def test_the_command_is_completed_as_the_others_are():
    environ = {**os.environ, "_RESILIENT_COMPLETE": "complete_bash", "COMP_WORDS": "resilient logs --ra", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['resilient']; from resilient.cli import app; app(prog_name='resilient')"
    shown = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert "--rank" in shown.stdout, shown.stderr


@pytest.mark.parametrize("packed", [False, True])
def test_logs_of_single_ranks_of_an_earlier_version_are_shown(tmp_path: Path, command: Command, packed: bool):
    folder = tmp_path / "old" / "logs" / "g1"
    folder.mkdir(parents=True)
    (tmp_path / "old" / ledger.EVENTS).touch()
    for rank in (0, 1, 10):
        (folder / f"rank{rank}.log").write_text(f"step 1\nas rank {rank}\n")
    if packed:
        (folder.parent / "g2").mkdir()
        packing.pack_folders(folder.parent, packing.Rule(folders=1, files=1000))
        assert not folder.exists()
    code, out, _ = command("--generation", "1", where=tmp_path / "old")
    assert code == 0
    assert out.splitlines() == [f"[rank {rank}] {line}" for rank in (0, 1, 10) for line in ("step 1", f"as rank {rank}")]
    _, out, _ = command("--generation", "1", "--rank", "10", where=tmp_path / "old")
    assert out == "[rank 10] step 1\n[rank 10] as rank 10\n"


COMMANDS = [["status"], ["stop"], ["evacuate", "n1"], ["watch"], ["logs"], ["report"]]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "there is no directory {}"),
        ("another tool's", "{} is not a run directory: it has no events.jsonl"),
        ("a file", "{} is a file; a run directory is wanted"),
    ],
    ids=["missing", "another tool's", "a file"],
)
def test_what_is_no_run_directory_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, says: str, words
):
    path = tmp_path / "typo"
    if kind == "a file":
        path.touch()
    elif kind == "another tool's":
        path.mkdir()
    code: object = 0
    try:
        code = guarded(lambda: app([words[0], str(path), *words[1:]], standalone_mode=True))
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, (out + err).count("\n")) == (Exit.UNUSABLE, 1), (out, err)
    assert says.format(path) in out + err


def test_a_run_directory_that_may_not_be_read_is_told_in_a_line(capsys: pytest.CaptureFixture[str]):
    def refused() -> None:
        raise PermissionError(13, "Permission denied", "/x/run/events.jsonl")

    assert guarded(refused) == Exit.UNUSABLE
    assert capsys.readouterr().err == "resilient: /x/run/events.jsonl: Permission denied\n"


def test_a_checkout_that_is_not_installed_says_how_to_install_it(capsys: pytest.CaptureFixture[str]):
    def started(name: str) -> None:
        raise PackageNotFoundError(name)

    assert guarded(lambda: started("resilient")) == Exit.UNUSABLE
    assert "-m pip install" in capsys.readouterr().err
    with pytest.raises(PackageNotFoundError):
        guarded(lambda: started("another"))


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1"])
@pytest.mark.parametrize("words", [["logs"], ["status"], ["status", "--json"]], ids=" ".join)
def test_what_a_locale_cannot_show_is_escaped(run_dir: Path, words: list[str], encoding: str):
    started = ledger.event_entry("run_started", {"name": "größe → 漢", "target_step": 9}, generation=0, t=1.0)
    (run_dir / ledger.EVENTS).write_bytes(ledger.encoded(started))
    with (run_dir / "logs" / "g4" / "node0.log").open("a") as log:
        log.write("2026-01-31 12:05:00.000 [rank 0] größe → 漢\n")
    command = [sys.executable, "-m", "resilient", words[0], str(run_dir), *words[1:]]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    if "--json" in words:
        assert json.loads(done.stdout)["name"] == "größe → 漢"
    else:
        assert "größe → 漢".encode(encoding, "backslashreplace") in done.stdout


@pytest.mark.parametrize("words", [["logs"], ["status"], ["status", "--json"]], ids=" ".join)
def test_output_that_cannot_be_written_is_told_in_a_line(run_dir: Path, words: list[str]):
    command = [sys.executable, "-m", "resilient", words[0], str(run_dir), *words[1:]]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (Exit.UNUSABLE, "resilient: No space left on device\n")
