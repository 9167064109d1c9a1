"""A run that the command line shortens: the warm-up of its file follows, a warm-up that contradicts itself is refused."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient.cli import app
from resilient.config import ConfigError, dump, load, notes, spans

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples/quickstart.yaml"
FILE = "train: {steps: 150}\noptimizer: {warmup_samples: 320}\n"  # 2400 samples


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path}/run\n{text}")
    return path


# (the file, the command line, warm-up in samples)
SHORTER = [
    (FILE, ["train.steps=15"], 32),
    (FILE, ["train.steps=20"], 42),
    (FILE, ["train.steps=1"], 2),
    (FILE, ["train.samples=240"], 32),
    (FILE, ["train={steps: 15}"], 32),
    (FILE, ["train.global_batch_size=4", "train.steps=60"], 32),
    (FILE, ["optimizer.decay_samples=240"], 32),
    ("train: {samples: 2400}\noptimizer: {warmup_samples: 320}\n", ["train.steps=15"], 32),
    ("train: {steps: 150}\noptimizer: {warmup_tokens: 81920}\n", ["train.steps=15"], 32),
    ("train: {steps: 150}\n", ["train.steps=15"], 24),  # the default's is a tenth
]


@pytest.mark.parametrize(("text", "overrides", "warmup"), SHORTER)
def test_the_warmup_shrinks_with_a_run_that_the_command_line_shortens(tmp_path: Path, text: str, overrides: list[str], warmup: int):
    path = write(tmp_path, text)
    config = load(path, overrides)
    assert spans(config)[0] == warmup
    (note,) = notes(path, overrides)
    assert note.startswith(f"the warm-up is {warmup} samples in place of ")


@pytest.mark.parametrize("overrides", [[], ["train.steps=21"], ["train.steps=300"], ["optimizer.lr=2e-3"], ["seed=1"]])
def test_a_warmup_that_fits_is_left_alone(tmp_path: Path, overrides: list[str]):
    path = write(tmp_path, FILE)
    assert load(path, overrides).optimizer.warmup_samples == 320
    assert notes(path, overrides) == []


def test_a_schedule_that_does_not_depend_on_the_steps_stays_as_it_is(tmp_path: Path):
    path = write(tmp_path, "train: {steps: 150}\noptimizer: {warmup_samples: 320, decay_samples: 2400}\n")
    assert spans(load(path, ["train.steps=15"])) == (320, 2400)
    assert notes(path, ["train.steps=15"]) == []


CONTRADICTIONS = [
    ("train: {steps: 15}\noptimizer: {warmup_samples: 320}\n", []),
    ("train: {steps: 15}\noptimizer: {warmup_samples: 320}\n", ["seed=1"]),
    ("train: {steps: 15}\noptimizer: {warmup_samples: 320}\n", ["train.steps=10"]),
    (FILE, ["train.steps=15", "optimizer.warmup_samples=320"]),
    (FILE, ["optimizer.warmup_samples=2400"]),
    (FILE, ["optimizer={warmup_samples: 2400}"]),
    ("train: {steps: 150}\n", ["train.steps=15", "optimizer.warmup_tokens=81920"]),
]


@pytest.mark.parametrize(("text", "overrides"), CONTRADICTIONS)
def test_numbers_of_one_place_that_contradict_each_other_are_refused(tmp_path: Path, text: str, overrides: list[str]):
    with pytest.raises(ConfigError, match=r"= (320|2400|81920): .* must be below the"):
        load(write(tmp_path, text), overrides)


def test_a_file_that_is_no_config_without_the_command_line_has_no_warmup_to_follow(tmp_path: Path):
    path = write(tmp_path, "train: {steps: many}\noptimizer: {warmup_samples: 320}\n")
    with pytest.raises(ConfigError, match="must be below the 240 samples"):
        load(path, ["train.steps=15"])


@pytest.mark.parametrize(
    ("text", "override", "steps"), [("samples: 160", "train.steps=7", 7), ("steps: 7", "train.samples=160", 10)]
)
def test_the_command_line_says_how_long_in_whichever_way(tmp_path: Path, text: str, override: str, steps: int):
    path = write(tmp_path, f"train: {{{text}}}\n")
    assert load(path, [override]).train.steps == steps
    with pytest.raises(ConfigError, match="give one of them"):
        load(path, ["train.steps=7", "train.samples=160"])


def test_the_short_run_and_then_the_whole_one_have_each_its_schedule(tmp_path: Path):
    """The short run's config stands in the run directory; the command without the override is the file's again."""
    short = load(QUICKSTART, ["train.steps=15", f"run_dir={tmp_path}"])
    written = tmp_path / "config.yaml"
    written.write_text(dump(short))
    assert load(written) == short
    whole = load(QUICKSTART, [f"run_dir={tmp_path}"])
    warmup, decay = spans(load(QUICKSTART))
    assert spans(whole) == (warmup, decay)
    assert spans(short)[0] < spans(short)[1] < decay


def test_the_plan_says_that_the_warmup_shrank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["plan", str(QUICKSTART), f"run_dir={tmp_path}", "train.steps=15"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert notes(QUICKSTART, words[2:])[0] in found.output
