"""The fingerprint in a run directory: where it comes from, what a resume does with it, and what is left behind."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoint import sampled
from resilient import ledger
from resilient.config import ConfigError, load, write
from resilient.identity import record
from resilient.identity.fingerprint import Content, Fingerprint, Lineage
from resilient.identity.resume import Known, Resumption


class Campaign:
    """A run directory that was trained in, without the training."""

    def __init__(self, directory: Path, text: str = "") -> None:
        self.run_dir = directory / "run"
        self.file = directory / "config.yaml"
        self.events: list[Any] = []  # that the ledger is told
        self.says(text)

    def says(self, text: str) -> None:
        self.file.write_text(f"run_dir: {self.run_dir}\n{text}")

    def resume(self, *settings: str, accept: tuple[str, ...] = (), versions: Any = None) -> Resumption:
        """What `resilient run` does, in its order."""
        config = load(self.file, settings)
        known = Known.of(config, self.file, settings)
        config, self.notes = known.keep(config)
        self.config = config
        found = known.resume(config, None, accept, versions)
        self.run_dir.mkdir(exist_ok=True)
        write(config, self.run_dir / "config.yaml")
        found.keep(self.run_dir)
        self.events += found.reported()
        return found

    def train(self, step: int = 5) -> None:
        (self.run_dir / "checkpoints" / f"step-{step:08}").mkdir(parents=True)


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    found = Campaign(tmp_path)
    found.resume()
    found.train()
    return found


def test_nothing_changed_is_nothing_said(campaign: Campaign):
    before = (campaign.run_dir / record.FILE).read_bytes()
    assert campaign.resume().changes == ()
    assert campaign.events == [] and (campaign.run_dir / record.FILE).read_bytes() == before


def test_a_refused_change_names_key_values_and_the_two_ways_on_and_leaves_all_as_it_was(campaign: Campaign):
    before = {path: path.read_bytes() for path in campaign.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as refused:
        campaign.resume("model.norm_eps=0.1", "seed=7")
    first, second = refused.value.problems
    assert (first.key, first.value, second.key, second.value) == ("seed", "7", "model.norm_eps", "0.1")
    for word in ("trained with 1e-05", "step 5", "--accept model.norm_eps", f"resilient fork {campaign.run_dir} NEW_RUN_DIR"):
        assert word in second.message
    assert {path: path.read_bytes() for path in campaign.run_dir.rglob("*") if path.is_file()} == before


def test_no_fork_is_recommended_with_a_model_that_no_checkpoint_can_fill(campaign: Campaign):
    with pytest.raises(ConfigError) as refused:
        campaign.resume("model.layers=2", "seed=7")
    first, second = refused.value.problems
    assert (first.key, second.key) == ("seed", "model.layers")
    assert "resilient fork" in first.message
    assert "resilient fork" not in second.message and "--accept" not in second.message
    assert "trained with 6" in second.message and "Set it back" in second.message and "another run_dir" in second.message


def test_an_accepted_change_is_told_and_kept_and_asked_for_no_more(campaign: Campaign):
    found = campaign.resume("model.norm_eps=0.1", accept=("model.norm_eps",))
    assert found.notes() == ["changed: model.norm_eps: 1e-05 → 0.1 (accepted)"]
    assert campaign.events == [{"key": "model.norm_eps", "from": 1e-5, "to": 0.1, "accepted": True}]
    kept = record.read(campaign.run_dir)
    assert kept is not None
    (accepted,) = kept.accepted
    assert (accepted.key, accepted.old, accepted.new, accepted.step) == ("model.norm_eps", 1e-5, 0.1, 5)
    assert campaign.resume("model.norm_eps=0.1").changes == ()
    with pytest.raises(ConfigError, match=r"trained with 0\.1"):
        campaign.resume()
    assert len(record.read(campaign.run_dir).accepted) == 1  # type: ignore[union-attr]


def test_a_told_change_is_one_line_in_the_ledger(campaign: Campaign):
    found = campaign.resume("optimizer.lr=0.5", "train.steps=400", versions={"torch": "9"})
    assert [each.key for each in found.changes] == ["optimizer.lr", "optimizer.decay_samples"]
    assert [(line["key"], line["from"], line["to"], line["accepted"]) for line in campaign.events] == [
        ("optimizer.lr", 1e-3, 0.5, False),
        ("optimizer.decay_samples", 4800, 6400, False),
    ]
    campaign.resume("optimizer.lr=0.5", "train.steps=400", versions={"torch": "10"})
    assert [line["key"] for line in campaign.events][2:] == ["versions.torch"]


@pytest.mark.parametrize(
    ("key", "why"), [("nonsense", "no key"), ("train.steps", "free to change"), ("optimizer.lr", "told to change")]
)
def test_only_what_would_be_refused_can_be_accepted(campaign: Campaign, key: str, why: str):
    with pytest.raises(ConfigError, match=why):
        campaign.resume(accept=(key,))


def test_before_anything_was_trained_everything_may_change(tmp_path: Path):
    campaign = Campaign(tmp_path)
    campaign.resume()
    assert campaign.resume("seed=7", "model.layers=2").changes == ()
    campaign.train()
    assert campaign.resume("seed=7", "model.layers=2").changes == ()
    with pytest.raises(ConfigError):
        campaign.resume()


def test_steps_that_only_a_fast_tier_holds_count_as_trained(tmp_path: Path):
    campaign = Campaign(tmp_path)
    campaign.resume()
    (campaign.run_dir / ledger.METRICS).write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="seed"):
        campaign.resume("seed=7")
    (campaign.run_dir / ledger.METRICS).rename(campaign.run_dir / f"{ledger.METRICS}.1")
    with pytest.raises(ConfigError, match="seed"):
        campaign.resume("seed=7")


def edited(run_dir: Path, **keys: Any) -> None:
    """As if the campaign had begun with other values."""
    found = record.read(run_dir)
    assert found is not None
    values = {name.replace("__", "."): value for name, value in keys.items()}
    record.write(run_dir, msgspec.structs.replace(found, keys={**found.keys, **values}))


def test_a_default_that_has_changed_since_stays_as_the_campaign_began(campaign: Campaign):
    edited(campaign.run_dir, model__norm_eps=1e-6, optimizer__weight_decay=0.3, data__split=[900, 99, 1])
    assert campaign.resume().changes == ()
    assert campaign.config.model.norm_eps == 1e-6 and campaign.config.optimizer.weight_decay == 0.3
    assert campaign.config.data.split == (900, 99, 1)
    assert [note.split()[0] for note in campaign.notes] == ["optimizer.weight_decay", "model.norm_eps", "data.split"]
    assert load(campaign.run_dir / "config.yaml").model.norm_eps == 1e-6  # what ranks will read
    assert campaign.resume().changes == ()  # and the next time again


def test_a_value_that_was_given_and_is_given_no_more_is_a_change(tmp_path: Path):
    campaign = Campaign(tmp_path, "model: {norm_eps: 0.1}\n")
    campaign.resume()
    campaign.train()
    campaign.says("")
    with pytest.raises(ConfigError, match=r"trained with 0\.1"):
        campaign.resume()


def test_a_run_directory_of_an_earlier_version_gets_its_fingerprint_from_its_config(campaign: Campaign):
    (campaign.run_dir / record.FILE).unlink()
    with pytest.raises(ConfigError, match="norm_eps"):
        campaign.resume("model.norm_eps=0.1")
    assert campaign.resume().changes == () and record.read(campaign.run_dir) is not None


def test_a_damaged_fingerprint_is_made_again_from_what_there_is(campaign: Campaign, caplog: pytest.LogCaptureFixture):
    for text in (b"", b"{", b'{"keys": 5}', b'{"keys": {}, "prepared": {"../x": {"size_bytes": 1, "sampled_sha256": ""}}}'):
        (campaign.run_dir / record.FILE).write_bytes(text)
        with pytest.raises(ConfigError, match="seed"):
            campaign.resume("seed=7")
        assert "is not used" in caplog.text
        caplog.clear()
    campaign.resume()
    assert record.read(campaign.run_dir) is not None


def test_a_text_that_has_changed_is_refused_and_one_that_was_touched_or_moved_is_not(tmp_path: Path):
    text = tmp_path / "a.txt"
    text.write_text("one two three")
    campaign = Campaign(tmp_path, f"data: {{text: [{text}]}}\n")
    campaign.resume()
    campaign.train()
    os.utime(text, (1, 1))
    assert campaign.resume().changes == ()
    moved = text.rename(tmp_path / "b.txt")
    campaign.says(f"data: {{text: [{moved}]}}\n")
    assert [each.kind for each in campaign.resume().changes] == ["told"]
    moved.write_text("one two thre3")
    with pytest.raises(ConfigError, match="13 bytes, sha256"):
        campaign.resume()
    campaign.resume(accept=("data.text",))
    assert campaign.resume().changes == ()


def test_prepared_data_that_was_replaced_is_refused(campaign: Campaign):
    made = campaign.run_dir / "data" / "corpus.bin"
    made.parent.mkdir()
    made.write_bytes(b"tokens")
    assert record.note_prepared(campaign.run_dir, [made]) == [] == record.note_prepared(campaign.run_dir, [made])
    made.write_bytes(b"others")
    with pytest.raises(ConfigError, match=r"data/corpus\.bin"):
        campaign.resume()
    (problem,) = record.note_prepared(campaign.run_dir, [made])
    assert problem.key == "data.text" and "--accept data.text" in problem.message
    made.unlink()  # is prepared again, and compared then
    assert campaign.resume().changes == ()
    made.write_bytes(b"others")
    assert record.note_prepared(campaign.run_dir, [made])
    campaign.resume(accept=("data.text",))
    assert record.note_prepared(campaign.run_dir, [made]) == []


def test_a_change_by_losing_nodes_is_no_change_of_the_config(campaign: Campaign):
    from resilient.config import settle

    config = load(campaign.file, [])
    known = Known.of(config, campaign.file, [])
    two, one = (settle(config, ranks) for ranks in (2, 1))
    known.resume(config, two).keep(campaign.run_dir)
    known = Known.of(config, campaign.file, [])
    assert [(each.key, each.old, each.new) for each in known.resume(config, one).changes] == [("parallel.dp", 2, 1)]
    after = known.resume(config, None)
    assert after.changes == () and after.fingerprint.keys["parallel.dp"] == 2


def test_lineage_and_what_was_accepted_stay(campaign: Campaign):
    lineage = Lineage("/a", "a", 3, 1, {"optimizer.lr": (1.0, 2.0)}, 5.0)
    found = record.read(campaign.run_dir)
    assert found is not None
    record.write(campaign.run_dir, msgspec.structs.replace(found, lineage=lineage))
    campaign.resume("seed=7", accept=("seed",))
    campaign.resume("seed=7", "optimizer.lr=0.1")
    found = record.read(campaign.run_dir)
    assert found is not None and found.lineage == lineage and [each.key for each in found.accepted] == ["seed"]


def test_a_fingerprint_survives_its_file(tmp_path: Path):
    found = Fingerprint(
        keys={"seed": 1, "args": {"a": [1, None, "ü"]}},
        prepared={"data/x": Content(1, "0" * 64)},
        lineage=Lineage("/a", "a", 3, 1, {"x": (None, [1])}, 5.0),
    )
    record.write(tmp_path, found)
    assert record.read(tmp_path) == found == record.of_state({"identity": record.plain(tmp_path)})
    assert [path.name for path in tmp_path.iterdir()] == [record.FILE]


@pytest.mark.parametrize("size", [0, 1, sampled.BLOCK_BYTES * sampled.BLOCKS, sampled.BLOCK_BYTES * sampled.BLOCKS + 1, 50 << 20])
def test_a_sampled_hash_is_of_size_head_and_tail(tmp_path: Path, size: int):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(size)
    (before,) = sampled.sampled([path])
    assert before.size_bytes == size
    for place in (0, size // 2, size - 1) if 0 < size <= sampled.BLOCK_BYTES * sampled.BLOCKS else (0, size - 1) if size else ():
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert sampled.sampled([path]) != [before]
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\0")
    assert sampled.sampled([path, path]) == [before, before]
    with path.open("ab") as file:
        file.write(b"\0")
    assert sampled.sampled([path]) != [before]


def test_a_terabyte_is_sampled_and_not_read(tmp_path: Path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    before = read_bytes()
    sampled.sampled([path])
    assert read_bytes() - before < 8 << 20


def read_bytes() -> int:
    return int(next(line.split()[1] for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")))


def test_keys_of_gradients_and_of_gpu_memory_are_no_change_for_a_campaign_from_before_them(campaign: Campaign):
    path = campaign.run_dir / record.FILE
    before = msgspec.json.decode(path.read_bytes())
    for key in ("parallel.reduce_gradients", "train.grad_dtype", "cluster.gpu_memory_gib"):
        del before["keys"][key]
    path.write_bytes(msgspec.json.encode(before))
    assert campaign.resume().changes == ()
