"""The table of classes against the schema, and what two fingerprints differ in."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from resilient.config import Config, load
from resilient.identity.classes import _FREE_SECTIONS, _KEYS, CLASSES, kind_of
from resilient.identity.comparison import compare
from resilient.identity.fingerprint import Content, Fingerprint, given_among, keys_of
from resilient.run_words import NO_CONFIG


def keys(section: type[BaseModel] = Config, at: str = "") -> list[str]:
    """Every key of the schema, dotted; a section that may be null, and a list of sections, is one key."""
    found = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += keys(inner, f"{at}{name}.")
        else:
            found.append(f"{at}{name}")
    return found


def config(*settings: str) -> Config:
    return load(NO_CONFIG, settings)


def fingerprint(*settings: str, **more: Any) -> Fingerprint:
    return Fingerprint(keys=keys_of(config(*settings), None), **more)


@pytest.mark.parametrize("key", keys())
def test_every_key_of_the_config_is_in_exactly_one_class(key: str):
    listed = [
        f"{section}.{name}" if section else name for sections in _KEYS.values() for section, names in sections.items()
        for name in names.split()
    ]  # fmt: skip
    assert listed.count(key) + (key.partition(".")[0] in _FREE_SECTIONS) == 1


def test_the_table_has_no_key_that_the_config_has_not():
    assert {key for key in CLASSES if key not in _FREE_SECTIONS} <= set(keys())
    assert set(_FREE_SECTIONS) <= Config.model_fields.keys()


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("train.steps=999", None),
        ("checkpoint.every_steps=3", None),
        ("resilience.max_restarts_per_hour=1", None),
        ("slurm.time_min=3", None),
        ("cluster.nodes=2", None),
        ("logging.tensorboard=false", None),
        ("optimizer.lr=0.5", "told"),
        ("optimizer.weight_decay=0.5", "told"),
        ("train.global_batch_size=32", "told"),
        ("parallel.tp=2", "told"),
        ("seed=7", "refused"),
        ("data.split=[900, 99, 1]", "refused"),
        ("data.tokenizer.vocab_size=600", "refused"),
        ("model.rope_theta=500000", "refused"),
        ("model.position=alibi", "refused"),
        ("model.norm_eps=0.1", "refused"),
        ("optimizer.beta2=0.5", "refused"),
        ("optimizer.name=adan", "refused"),
        # What `auto` comes to, and what is not in effect, is no change.
        ("model.kv_heads=8", None),
        ("optimizer.beta1=0.9", None),
        ("optimizer.decay_samples=4800", None),
        ("optimizer.wsd_fraction=0.5", None),
    ],
)
def test_a_change_has_its_class(setting: str, kind: str | None):
    # With an end of the decay of its own, more steps are no other schedule.
    fixed = ("optimizer.decay_samples=4800",)
    own = (setting,) if setting.startswith("optimizer.decay") else (*fixed, setting)
    found = [each for each in compare(fingerprint(*fixed), fingerprint(*own)) if each.key == setting.partition("=")[0]]
    assert [each.kind for each in found] == ([kind] if kind is not None else [])


def test_more_steps_are_told_where_the_schedule_follows_from_them():
    found = compare(fingerprint(), fingerprint("train.steps=600"))
    assert [(each.key, each.old, each.new, each.kind) for each in found] == [("optimizer.decay_samples", 4800, 9600, "told")]


def test_of_a_script_only_its_call_counts():
    before, after = (fingerprint(f"entrypoint=train.py --lr {lr}", f"seed={lr}", f"model.layers={lr}") for lr in (1, 2))
    assert [(each.key, each.kind) for each in compare(before, after)] == [("entrypoint", "told")]


def test_files_are_compared_by_what_is_in_them():
    one, other = Content(5, "a" * 64), Content(5, "b" * 64)
    text = 'data.text=["{}"]'
    here = fingerprint(text.format("/a.txt"), contents={"data.text": [one]})
    there = fingerprint(text.format("/b.txt"), contents={"data.text": [one]})
    changed = fingerprint(text.format("/a.txt"), contents={"data.text": [other]})
    assert [(each.key, each.kind, each.new) for each in compare(here, there)] == [("data.text", "told", ["/b.txt"])]
    assert [(each.key, each.kind) for each in compare(here, changed)] == [("data.text", "refused")]
    assert compare(here, here) == []


def test_another_weight_in_a_blend_is_refused():
    blend = "data={{text: null, path: [{{path: /a, weight: {}}}, {{path: /b}}]}}"
    files = {"data.path": [Content(1, "a" * 64)] * 4}
    found = compare(*(fingerprint(blend.format(weight), contents=files) for weight in (1.0, 2.0)), None)  # type: ignore[misc]
    assert [(each.key, each.kind) for each in found] == [("data.path", "refused")]


def test_versions_are_told_and_unknown_ones_are_no_change():
    old, new, unknown = (fingerprint(versions=each) for each in ({"torch": "2.12", "x": "1"}, {"torch": "2.13"}, {}))
    assert [(each.key, each.old, each.new, each.kind) for each in compare(old, new)] == [
        ("versions.torch", "2.12", "2.13", "told"),
        ("versions.x", "1", None, "told"),
    ]
    assert compare(unknown, new) == compare(old, unknown) == []


def test_a_key_that_an_earlier_version_did_not_have_is_compared_with_the_default():
    before = fingerprint()
    del before.keys["model.norm_eps"]
    defaults = keys_of(Config(), None)
    assert compare(before, fingerprint(), defaults) == []
    assert [each.key for each in compare(before, fingerprint("model.norm_eps=0.1"), defaults)] == ["model.norm_eps"]


def test_what_a_config_says_itself_is_known():
    assert given_among({"seed": 1, "train": {"steps": 3}, "data": {"tokenizer": {"vocab_size": 300}}}) == [
        "seed",
        "data.tokenizer.vocab_size",
    ]


def test_the_class_of_what_is_inside_a_key_is_that_of_the_key():
    assert [kind_of(each) for each in ("data.path.0.weight", "checkpoint.tiers.0.path", "versions.torch")] == [
        "refused",
        "free",
        "told",
    ]


def test_a_fingerprint_is_the_same_from_its_own_resolved_config(tmp_path: Path):
    from resilient.config import write

    path = tmp_path / "config.yaml"
    for settings in ((), ("optimizer.name=adan", "model.position=none"), ("train.samples=1000",)):
        first = config(f"run_dir={tmp_path}", *settings)
        write(first, path)
        assert keys_of(load(path), None) == keys_of(first, None)
