"""The page of a campaign: it has the figures of `status`, can be read by anybody, and shows nothing that is secret."""

import json
import re
import shlex
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from reported import agreed, drawn, written
from runs import HOSTS, KINDS, made
from typer.testing import CliRunner

from resilient import ledger
from resilient.account import PARTS
from resilient.cli import app
from resilient.drawing import page
from resilient.exits import EnvironmentUnusable
from resilient.redaction import HIDDEN, hidden, hidden_config, hidden_text
from resilient.report import command
from resilient.report.reading import read
from resilient.status import draw, inspect

ROOT = Path(__file__).parents[3]


def counted(root: ET.Element, kind: str) -> int:
    return sum(each.get("class") == kind for each in root.iter())


def test_every_figure_of_the_page_is_that_of_status(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=400, faults=12, jobs=4)
    found = agreed(run_dir, tmp_path / "page.html")
    summary = asdict(inspect(run_dir))
    assert {"step", "target_step", "loss", "goodput", "wall_s", "faults", "recovered", "downtime_s", "lost_steps"} <= set(found)
    assert {f"rank_seconds.{name}" for name, spent in summary["rank_seconds"].items() if spent} <= set(found)
    assert sum(key.startswith("incidents.") for key in found) >= 12
    assert {key for key in found if key.startswith("kinds.")} == {f"kinds.{kind}.faults" for kind in KINDS}
    assert {f"runs.{job}.{name}" for job in range(4) for name in ("step", "faults", "lost_steps", "exit_code")} <= set(found)
    assert found["goodput"][1] == f"{summary['goodput']:.1%}" and found["step"][1] == "400" and found["faults"][1] == "12"


def test_the_past_that_is_read_for_the_page_agrees_with_status(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=400, faults=12, jobs=4)
    past, summary = read(run_dir), inspect(run_dir)
    assert past.kinds.total() == summary.faults == sum(job.faults for job in past.jobs) == 12
    assert sum(job.downtime_s for job in past.jobs) == pytest.approx(summary.downtime_s)
    assert sum(job.lost_steps for job in past.jobs) == summary.lost_steps == 12
    assert [(job.first_step, job.last_step) for job in past.jobs] == [(1, 100), (101, 200), (201, 300), (301, 400)]
    assert past.tiers["memory"].snapshots == 8 and past.tiers["memory"].size_bytes == 8 << 24
    assert set(past.heat.rows()) == set(HOSTS)


@pytest.mark.parametrize(("directory", "file"), [(0o700, 0o600), (0o750, 0o640)], ids=["private", "group"])
@pytest.mark.parametrize("output", [False, True], ids=["", "--output"])
def test_the_page_in_a_run_directory_has_the_mode_of_its_files(tmp_path: Path, directory: int, file: int, output: bool):
    made(tmp_path, steps=20, faults=0, jobs=1).chmod(directory)
    path = tmp_path / ("other.html" if output else command.FILE)
    words = ["report", str(tmp_path), *(["--output", str(path)] if output else [])]
    subprocess.run([sys.executable, "-m", "resilient", *words], check=True, umask=0)
    assert stat.S_IMODE(path.stat().st_mode) == file


def test_a_page_elsewhere_has_the_mode_that_its_user_wants(tmp_path: Path):
    made(tmp_path / "run", steps=20, faults=0, jobs=1).chmod(0o700)
    path = tmp_path / "page.html"
    subprocess.run([sys.executable, "-m", "resilient", "report", str(tmp_path / "run"), "-o", str(path)], check=True, umask=0o022)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_what_was_moved_aside_is_in_the_page(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=400, faults=12, jobs=4)
    whole = read(run_dir)
    for name in (ledger.EVENTS, ledger.METRICS):
        lines = (run_dir / name).read_text().splitlines(keepends=True)
        for part, begin, end in ((f"{name}.2", 0, 20), (f"{name}.1", 20, 40), (name, 40, None)):
            (run_dir / part).write_text("".join(lines[begin:end]))
    assert read(run_dir).jobs == whole.jobs and read(run_dir).kinds == whole.kinds
    agreed(run_dir, tmp_path / "page.html")


def test_a_fault_whose_id_no_file_can_be_called_is_shown(tmp_path: Path):
    """A disk has damaged the ledger."""
    run_dir = made(tmp_path / "run", steps=10, faults=1, jobs=1)
    (run_dir / "incidents").mkdir()
    events = run_dir / "events.jsonl"
    events.write_text(events.read_text().replace('"g1-1"', f'"{"g" * 300}"'))
    assert f">{'g' * 300}<" in written(run_dir)


def test_the_page_shows_faults_jobs_queue_nodes_tiers_and_changes(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=400, faults=12, jobs=4)
    (run_dir / "incidents" / "g2-1").mkdir(parents=True)
    (run_dir / "config.yaml").write_text("name: made\nslurm: {environment: {KEY: hush}}\n")
    text = written(run_dir)
    root = drawn(text)
    assert counted(root, "away") == 3 + 1  # one of them in the key
    assert counted(root, "job0") + counted(root, "job1") == 2 * 4
    assert counted(root, "cell") >= len(HOSTS)
    assert "optimizer.lr" in text and "SIGKILL" in text and "restart workers" in text and "16.0 MiB" in text
    assert [each.get("href") for each in root.iter("a")] == ["incidents/g2-1"]
    assert "hush" not in text and HIDDEN in text
    told = [title.text or "" for title in root.iter("title")]
    assert any("g2-1 at" in title and "exit, rank 0 (n0): SIGKILL; restart workers, 1.90 s down" in title for title in told)
    assert any("no job ran for" in title for title in told)


def test_nothing_on_the_page_comes_from_outside_and_nothing_in_it_is_taken_for_markup(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=20, faults=2, jobs=1)
    evil = '"><img src=x><script>alert(1)</script>\u0000'
    events = [json.loads(line) for line in (run_dir / ledger.EVENTS).read_text().splitlines()]
    for line in events:
        line |= {key: evil for key in ("detail", "evidence", "reason", "host", "key") if key in line}
        line |= {"name": evil} if line["event"] == "run_started" else {}
    (run_dir / ledger.EVENTS).write_text("".join(f"{json.dumps(line)}\n" for line in events))
    text = written(run_dir)
    root = drawn(text)
    assert not {"script", "img", "link", "iframe"} & {element.tag for element in root.iter()}
    assert all("src" not in element.attrib for element in root.iter())
    assert "url(" not in text and "@import" not in text and "http:" not in text
    shown = command.as_markdown(run_dir)
    assert not re.search(r"(?<!\\)<", shown)


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_campaign_without_a_step_has_a_page(tmp_path: Path, jobs: int):
    line = {"t": 1.7e9, "event": "run_started", "generation": 0, "host": "h", "name": "young", "target_step": 9}
    (tmp_path / ledger.EVENTS).write_text(f"{json.dumps(line)}\n" * jobs)
    text = written(tmp_path)
    drawn(text)
    assert "No step was finished." in text and ("No job has started." in text) == (jobs == 0)
    assert ("young" if jobs else "campaign") in command.as_markdown(tmp_path)


def test_a_folder_that_is_no_run_directory_has_no_page(tmp_path: Path):
    with pytest.raises(EnvironmentUnusable, match="is not a run directory"):
        command.write(tmp_path, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", [".", "..", "/", "here"])
@pytest.mark.parametrize("words", [["report", "--output"], ["status", "--svg"], ["bench", "--best"]], ids=lambda words: words[0])
def test_what_is_no_file_to_write_to_is_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], file: str):
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "run", steps=1, faults=0, jobs=1)
    (tmp_path / "here").mkdir()
    done = CliRunner().invoke(app, [words[0], "run", words[1], file])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert words[1] in done.output and "is a directory, and a file is wanted" in done.output


@pytest.mark.parametrize("words", [["--markdown", "-o", "x"], ["--watch", "-o", "x"], ["--markdown", "--watch"]])
def test_ways_to_get_a_report_that_exclude_each_other_are_wrong_use(tmp_path: Path, words: list[str]):
    made(tmp_path / "run", steps=1, faults=0, jobs=1)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), *words])
    assert done.exit_code == 2 and "does not go with --" in done.output


@pytest.mark.parametrize("words", [["--port", "8000"], ["--markdown", "--port", "0"]])
def test_a_port_without_a_page_to_serve_is_wrong_use(tmp_path: Path, words: list[str]):
    made(tmp_path / "run", steps=1, faults=0, jobs=1)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), *words])
    assert done.exit_code == 2 and "goes with --watch" in done.output
    assert not (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize("losses", [[1e308, -1e308], [5e-324, 0.0], [5e-324, 5e-324]], ids=["largest", "smallest", "level"])
def test_losses_at_the_ends_of_what_a_double_holds_have_a_page(tmp_path: Path, losses: list[float]):
    run_dir = made(tmp_path / "run", steps=10, faults=0, jobs=1)
    lines = [json.loads(each) for each in (run_dir / "metrics.jsonl").read_text().splitlines()]
    pairs = ({**each, "loss": losses[at % 2], "step_s": 1e-320} for at, each in enumerate(lines))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    assert "<polyline" in written(run_dir)


# -- how it looks ----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative, of sRGB, as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [page.LIGHT, page.DARK], ids=["light", "dark"])
def test_all_text_has_the_contrast_of_wcag_aa(colours: dict[str, str]):
    assert set(page.LIGHT) == set(page.DARK)
    pairs = [(text, ground) for text in page.TEXTS for ground in page.GROUNDS]
    pairs += [("ground", "good"), ("ground", "bad"), ("ink", "rule")]  # badges, and numbers of jobs in their bands
    assert {
        pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs if contrast(colours[pair[0]], colours[pair[1]]) < 4.5
    } == {}


def test_text_has_no_colours_but_those_whose_contrast_is_known(tmp_path: Path):
    text = written(made(tmp_path / "run", steps=40, faults=2, jobs=1))
    style = text[text.index("body {") : text.index("</style>")]  # behind the colours themselves
    assert "#" not in style
    rules = [rule.strip() for block in style.split("}") for rule in block.partition("{")[2].split(";")]
    named = {rule.partition("var(--")[2].rstrip(")") for rule in rules if rule.startswith("color:")}
    assert named <= {*page.TEXTS, "ground"}  # the latter on badges
    assert set(PARTS) == {part for part in PARTS if page.parts_bar({part: 1.0}).count("background")}


# -- what is not shown ---------------------------------------------------------------------------------------------------


SHAPES = {
    "Hugging Face": "hf_" + "aB3" * 11,
    "GitHub": "ghp_" + "aB3" * 12,
    "GitLab": "glpat-" + "aB3_" * 5,
    "OpenAI": "sk-proj-" + "aB3" * 12 + "_x-y",
    "AWS": "AKIA" + "A2B3" * 4,
    "an account": "postgres://me:pass@host/db",
}


@pytest.mark.parametrize("secret", SHAPES.values(), ids=SHAPES.keys())
def test_what_looks_like_a_secret_is_not_shown_of_what_a_fault_says(tmp_path: Path, secret: str):
    run_dir = made(tmp_path / "run", steps=10, faults=0, jobs=1)
    said = {"detail": f"401 for {secret} of us", "evidence": f"argv: train.py --api-key k3y, {secret}"}
    lines = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    fault = {"event": "fault", "t": json.loads(lines[-1])["t"], "generation": 1, "host": "n0", "fault_id": "g1-9", "kind": "exit",
             "ranks": [1], "nodes": [0], "step": 3, "detect_s": 0.1, **said}  # fmt: skip
    (run_dir / "events.jsonl").write_text("".join([*lines[:-1], json.dumps(fault) + "\n", lines[-1]]))
    text = written(run_dir)
    assert "401 for" in text and "of us" in text and "argv: train.py --api-key" in text
    assert secret not in text and "k3y" not in text and "me:pass" not in text
    assert secret not in command.as_markdown(run_dir)
    draw(run_dir, tmp_path / "campaign.svg")
    picture = (tmp_path / "campaign.svg").read_text()
    assert "401 for" in picture and secret not in picture


@pytest.mark.parametrize(
    "text",
    [
        "decay_tokens 5, tokens=3, --max-tokens 5 --tokenizer gpt2, monkey=3",
        "task-aaaaaaaaaaaaaaaaaaaaaaaa, hf_transformers_of_some_length_x, sk-learn, https://host/a@b",
        "KeyError: 'lr' in train.py; the author signs off",
    ],
)
def test_what_is_no_secret_is_shown(text: str):
    assert hidden_text(text) == text


def test_a_long_text_of_one_word_is_looked_through_at_once():
    for piece in ("a-", "a.", "sk-a", "x ", "--a ", "'", "://", "authorization: "):
        hidden_text(piece * 20_000)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("logging.sinks.webhook.url", "https://hooks.example.org/T0/secret", HIDDEN),
        ("slurm.environment", {"WANDB_API_KEY": "k", "N": 1}, {"WANDB_API_KEY": HIDDEN, "N": 1}),
        ("api_key", "k", HIDDEN),
        ("password", ["a", ""], [HIDDEN, ""]),
        ("data.path", "s3://user:pass@host/bucket?sig=1", "s3://host/…"),
        (
            "slurm.setup",
            ["export HF_TOKEN='a b'; cd x", "export API-KEY=k N=1"],
            [
                f"export HF_TOKEN={HIDDEN}; cd x",
                f"export API-KEY={HIDDEN} N=1",
            ],
        ),
        (
            "entrypoint",
            'train.py --wandb-api-key k --lr 3 --hub_token="t u"',
            f"train.py --wandb-api-key {HIDDEN} --lr 3 --hub_token={HIDDEN}",
        ),
        (
            "entrypoint",
            shlex.join(["train.py", "--password", "it's me", "--api-key=it's you", "--token=a b", "--lr=3 4"]),
            f"train.py --password {HIDDEN} '--api-key={HIDDEN}' '--token={HIDDEN}' '--lr=3 4'",
        ),
        ("slurm.setup", 'export TOKEN="a\\"b c" N=1; A_KEY=x\\ y', f"export TOKEN={HIDDEN} N=1; A_KEY={HIDDEN}"),
        (
            "entrypoint",
            "train.py --tokens 5 --monkey=3 --key-file=f --keys 2",
            "train.py --tokens 5 --monkey=3 --key-file=f --keys 2",
        ),
        ("entrypoint", "-m fit --logger.api_key k --lr 3", f"-m fit --logger.api_key {HIDDEN} --lr 3"),
        ("entrypoint", "train.py -api_key k --model.wandb-token=k", f"train.py -api_key {HIDDEN} --model.wandb-token={HIDDEN}"),
        ("entrypoint", "train.py --hf_tokens k --max-tokens 5", f"train.py --hf_tokens {HIDDEN} --max-tokens 5"),
        ("slurm.setup", ["wandb login --host h k; cd x"], [f"wandb login {HIDDEN}; cd x"]),
        ("slurm.setup", "setenv HF_TOKEN k\nset -x A_KEY k; cd x", f"setenv HF_TOKEN {HIDDEN}\nset -x A_KEY {HIDDEN}; cd x"),
        ("slurm.setup", "curl -H 'Authorization: Bearer k' h", f"curl -H 'Authorization: Bearer {HIDDEN}' h"),
        ("slurm.setup", "curl -H Private-Token:k h", f"curl -H Private-Token:{HIDDEN} h"),
        ("args.words", ["--api-key", "k", "--lr", "3"], ["--api-key", HIDDEN, "--lr", "3"]),
        *((f"args.{name}", "k", HIDDEN) for name in ("apikey", "auth", "passphrase", "api_keys", "hf_tokens", "secrets", "dsn")),
        *((f"args.{name}", "k", "k") for name in ("keys", "tokens", "max_tokens", "tokenizer", "author", "key_file")),
        ("args.note", f"as {SHAPES['Hugging Face']} has it", f"as {HIDDEN} has it"),
        ("data.tokenizer", "gpt2", "gpt2"),
        ("data.tokenizer.vocab_size", 4096, 4096),
        ("train.tokens_per_s", "7", "7"),
        ("optimizer.decay_tokens", "9", "9"),
        ("model.layers", 4, 4),
    ],
)
def test_values_that_are_secret_by_their_name_are_hidden(key: str, value: Any, shown: Any):
    assert hidden(key, value) == shown


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "a: !!python/object:os.x {}", "&a [*a]"])
def test_what_is_no_config_is_not_shown(text: str):
    assert hidden_config(text) == ""
