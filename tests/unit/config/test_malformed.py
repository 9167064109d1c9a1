"""Configs that are wrong, each in its own way: one message with file, line, key, value and what is allowed."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from soak import soaked_after

from resilient.config import ConfigError, load


@dataclass
class Bad:
    """A config, the line that is to blame, and what the message must say."""

    name: str
    text: str | bytes
    line: int | None
    says: tuple[str, ...]
    overrides: tuple[str, ...] = field(default=())


BAD = [
    Bad(
        "a variable with a letter that no terminal shows",
        'checkpoint:\n  tiers:\n    - {name: a, path: "${r\ufeffun_dir}/x"}\n',
        3,
        ("environment variable r\\ufeffun_dir is not set",),
    ),
    Bad(
        "more ranks than there can be",
        "cluster: {nodes: 2, procs_per_node: 4294967295, device: cpu}\ntrain: {global_batch_size: 2147483648}\n",
        2,
        ("train.global_batch_size", "no sample for each of dp = 8589934590 replicas", "fewer ranks"),
    ),
    Bad(
        "more steps than a reader of the ledger takes",
        "train: {steps: 9223372036854775807}\n",
        1,
        ("train.steps = 9223372036854775807", "at most 9007199254740992"),
    ),
    Bad(
        "a free value that is not finite",
        "args:\n  clip: [1.0, .inf]\n",
        2,
        ("args.clip.1 = inf", "a number here is finite", "text in quotes"),
    ),
    Bad(
        "a setting of another package's sink that is not finite",
        "logging: {sinks: {others: {mine: {above: .nan}}}}\n",
        1,
        ("logging.sinks.others.mine.above = nan", "a number here is finite"),
    ),
    Bad(
        "a free value in Latin-1",
        "name: x\n",
        None,
        (r"command line: args.x: gr\xfcn has bytes that are not UTF-8",),
        ("args.x=gr\udcfcn",),
    ),
    Bad(
        "a name in Latin-1",
        "name: x\n",
        None,
        (r"command line: args: gr\xfcn has bytes that are not UTF-8",),
        ("args.gr\udcfcn=1",),
    ),
    Bad(
        "a script in Latin-1",
        "name: x\n",
        None,
        (r"command line: entrypoint: gr\xfcn.py has bytes that are not UTF-8",),
        ("entrypoint=gr\udcfcn.py",),
    ),
    Bad("variables that are a set", "slurm: {environment: !!set {A, B}}\n", 1, ("slurm.environment", "allowed: a mapping")),
    Bad("a section that is a set", "slurm: !!set {environment: {A: 1}}\n", 1, ("slurm", "a mapping")),
    # keys
    Bad("unknown section", "name: x\nmodle: {}\n", 2, ("modle", "unknown key", "did you mean 'model'?", "checkpoint")),
    Bad("unknown key", "train:\n  step: 5\n", 2, ("train.step", "did you mean 'steps'?", "global_batch_size")),
    Bad("unknown key far off", "train: {zzz: 5}\n", 1, ("train.zzz", "unknown key", "steps")),
    Bad("misspelt watchdog", "resilience:\n  fense_s: 3\n", 2, ("fense_s", "did you mean 'fence_s'?")),
    Bad(
        "unknown key in a tier",
        "checkpoint:\n  tiers:\n    - {name: a, path: /x}\n    - name: a\n      path: /x\n      pth: /x\n",
        6,
        ("tiers.1.pth", "'path'"),
    ),
    Bad("key twice", "train:\n  steps: 1\n  steps: 2\n", 3, ("train.steps", "twice", "line 2")),
    Bad("section twice", "train: {steps: 1}\ntrain: {steps: 2}\n", 2, ("train", "twice")),
    Bad("key that is a number", "5: x\n", 1, ("'5'", "not text")),
    Bad("key that is a list with a date", "? [a, 2020-01-01]\n: 1\n", 1, ("the key [a, 2020-01-01] is not text, as all keys are",)),
    Bad("key that is a mapping", "train:\n  ? {a: b}\n  : 1\n", 2, ("the key {a: b} is not text",)),
    Bad("key of several lines", "? - a\n  - b\n: 1\n", 1, ("the key - a - b is not text",)),
    Bad("key that is a boolean", "train:\n  yes: 1\n", 2, ("not text",)),
    Bad(
        "section that only the command line misspells",
        "name: x\n",
        None,
        ("command line: trian: unknown key; did you mean 'train'?",),
        ("trian.steps=3",),
    ),
    Bad(
        "key in a section that only the command line makes",
        "train: {steps: 1}\n",
        None,
        ("command line: train.tsak: unknown key",),
        ("train.tsak.steps=3",),
    ),
    Bad("key without its section", "name: x\n", None, ("steps: unknown key; did you mean 'train.steps'?",), ("steps=3",)),
    Bad("key in another section", "train:\n  lr: 1\n", 2, ("train.lr: unknown key; did you mean 'optimizer.lr'?",)),
    Bad("missing path of a tier", "checkpoint:\n  tiers:\n    - {name: a}\n", 3, ("tiers.0.path", "is missing")),
    Bad("missing name of a tier", "checkpoint: {tiers: [{path: /x}]}\n", 1, ("tiers.0.name", "is missing")),
    # values
    Bad("text for a number", "train:\n  steps: many\n", 2, ("train.steps = many", "a whole number, at least 1")),
    Bad(
        "a profile that ends before it begins",
        "logging: {profile_steps: [5, 2]}\n",
        1,
        ("logging.profile_steps = [5, 2]", "the last step must not be before the first"),
    ),
    Bad("octal number", "train:\n  steps: 010\n", 2, ("010 is 8 in YAML", "plain decimal, or text in quotes")),
    Bad("octal number on the command line", "", None, ("command line: train.steps: 010 is 8 in YAML",), ("train.steps=010",)),
    Bad("octal number below zero", "seed: -0_17\n", 1, ("-0_17 is -15 in YAML",)),
    Bad("octal number for a rate", "optimizer: {lr: 010}\n", 1, ("010 is 8 in YAML",)),
    Bad("octal number for a text", "slurm:\n  account: 0123\n", 2, ("0123 is 83 in YAML", "text in quotes")),
    Bad("octal number in what is free", "args:\n  code: [007]\n", 2, ("007 is 7 in YAML",)),
    Bad("sexagesimal number", "train: {steps: 1:30}\n", 1, ("1:30 is 90 in YAML", "plain decimal")),
    Bad("sexagesimal fraction", "optimizer:\n  lr: 1:30.5\n", 2, ("1:30.5 is 90.5 in YAML",)),
    Bad("sexagesimal number for a text", "", None, ("slurm.account: 12:30 is 750 in YAML",), ("slurm.account=12:30",)),
    Bad("number for a text", "slurm: {account: 123}\n", 1, ("slurm.account = 123", "text or null; put it in quotes")),
    Bad("date for a path", "run_dir: 2020-01-01\n", 1, ("run_dir = 2020-01-01", "put it in quotes")),
    Bad("boolean for a text", "slurm: {account: on}\n", 1, ("slurm.account = true", "put it in quotes")),
    Bad("zero steps", "train: {steps: 0}\n", 1, ("train.steps = 0", "at least 1")),
    Bad("negative steps", "train: {steps: -3}\n", 1, ("train.steps = -3", "at least 1")),
    Bad("fraction for a count", "train: {steps: 2.5}\n", 1, ("train.steps = 2.5", "a whole number")),
    Bad("boolean for a count", "train: {steps: yes}\n", 1, ("train.steps = true", "a whole number")),
    Bad("boolean for a number", "optimizer: {lr: true}\n", 1, ("optimizer.lr = true", "a number, above 0")),
    Bad("null for a number", "train:\n  steps:\n", 2, ("train.steps = null", "a whole number")),
    Bad("list for a number", "train: {steps: [1]}\n", 1, ("train.steps = [1]", "a whole number")),
    Bad("negative rate", "optimizer: {lr: -1}\n", 1, ("optimizer.lr = -1", "above 0")),
    Bad("infinite rate", "optimizer: {lr: .inf}\n", 1, ("optimizer.lr = inf", "a number")),
    Bad("rate that is none", "optimizer: {lr: .nan}\n", 1, ("optimizer.lr = nan", "a number")),
    Bad("beta of 1", "optimizer: {beta1: 1.0}\n", 1, ("optimizer.beta1 = 1.0", "below 1")),
    Bad("unknown precision", "train: {precision: fp16}\n", 1, ("train.precision = fp16", "bf16, fp32")),
    Bad("unknown launcher", "cluster: {launcher: pbs}\n", 1, ("cluster.launcher = pbs", "auto, local, slurm")),
    Bad("unknown device", "cluster:\n  device: tpu\n", 2, ("cluster.device = tpu", "auto, cpu, cuda")),
    Bad("unknown norm", "model: {norm: batchnorm}\n", 1, ("model.norm = batchnorm", "rmsnorm, layernorm")),
    Bad("unknown schedule", "parallel: {schedule: 2f2b}\n", 1, ("parallel.schedule", "1f1b")),
    Bad("ZeRO stage 4", "parallel: {zero_stage: 4}\n", 1, ("parallel.zero_stage = 4", "1, 2, 3")),
    Bad("word for a flag", "logging: {tensorboard: maybe}\n", 1, ("logging.tensorboard = maybe", "true or false")),
    Bad("number for a flag", "logging: {tensorboard: 1}\n", 1, ("logging.tensorboard = 1", "true or false")),
    Bad("neither auto nor a count", "cluster: {procs_per_node: some}\n", 1, ("procs_per_node = some", "at least 1", "auto")),
    Bad("name with a slash", "name: a/b\n", 1, ("name = a/b", "text, of the form")),
    Bad("number for a name", "name: 7\n", 1, ("name = 7", "text")),
    Bad("date for a name", "name: 2020-01-01\n", 1, ("name = 2020-01-01: ", "text")),
    Bad("time for a name", "name: 2020-01-01 10:00:00\n", 1, ("name = 2020-01-01 10:00:00: ", "text")),
    Bad("date for a number", "", None, ("train.steps = 2020-01-01: ",), ("train.steps=2020-01-01",)),
    Bad(
        "list of a date and others for a name",
        "name: [2020-01-01, null, {a: true}, x]\n",
        1,
        ("name = [2020-01-01, null, {'a': true}, 'x']: ",),
    ),
    Bad("entry point without function", "entrypoint: trainer\n", 1, ("entrypoint = trainer", "of the form")),
    Bad("number for a path", "run_dir: 7\n", 1, ("run_dir = 7", "a path")),
    Bad("negative seed", "seed: -1\n", 1, ("seed = -1", "at least 0")),
    Bad("split of two", "data: {split: [9, 1]}\n", 1, ("data.split",)),
    Bad("split of words", "data:\n  split: [a, 1, 1]\n", 2, ("data.split.0 = a", "a whole number")),
    Bad("small vocabulary", "data: {tokenizer: {vocab_size: 100}}\n", 1, ("vocab_size = 100", "at least 257")),
    Bad("weight of 0", "data:\n  path:\n    - {path: a, weight: 0}\n", 3, ("data.path.0.weight = 0", "above 0")),
    Bad("section that is a word", "train: fast\n", 1, ("train = fast", "a mapping with the keys steps")),
    Bad("section that is a list", "train:\n  - steps\n", 1, ("train", "a mapping with the keys")),
    Bad("no tiers", "checkpoint: {tiers: []}\n", 1, ("checkpoint.tiers",)),
    Bad("tier name with a space", "checkpoint: {tiers: [{name: a b, path: /x}]}\n", 1, ("tiers.0.name = a b",)),
    # what must fit together
    Bad(
        "batch not divisible",
        "cluster: {procs_per_node: 2}\ntrain:\n  global_batch_size: 15\n",
        3,
        ("= 15", "micro_batch_size = 4", "nearest: 12, 16"),
    ),
    Bad("dp that is not the world", "cluster: {procs_per_node: 4}\nparallel:\n  dp: 3\n", 3, ("parallel.dp = 3", "allowed: 4")),
    Bad(
        "replicas that do not divide dp",
        "cluster: {procs_per_node: 6}\nparallel: {dp_replicate: 4}\n",
        2,
        ("parallel.dp_replicate = 4", "does not divide dp = 6", "nearest: 3, 6"),
    ),
    Bad(
        "shards that are not dp",
        "cluster: {procs_per_node: 8}\nparallel: {dp_replicate: 2, dp_shard: 2}\n",
        2,
        ("parallel.dp_shard = 2", "dp_replicate 2 is not dp = 8", "allowed: 4, or auto, or dp_replicate 4"),
    ),
    Bad("replicas of a dp that is given", "parallel: {dp: 4, dp_replicate: 3}\ncluster: {nodes: auto}\n", 1, ("dp = 4", "2, 4")),
    Bad("tp × pp beyond the world", "cluster: {procs_per_node: 2}\nparallel: {tp: 4}\n", 2, ("parallel", "does not divide")),
    Bad("heads that do not divide", "model:\n  hidden: 100\n  heads: 3\n", 3, ("model.heads = 3", "model.hidden = 100")),
    Bad("kv_heads that do not divide", "model:\n  kv_heads: 3\n", 2, ("model.kv_heads = 3", "model.heads = 8")),
    Bad("odd heads for rope", "model: {hidden: 24, heads: 8}\n", 1, ("model.heads = 8", "even")),
    Bad("tp that does not divide", "parallel:\n  tp: 3\n", 2, ("parallel.tp = 3", "model.heads = 8")),
    Bad("more stages than layers", "parallel:\n  pp: 9\n", 2, ("parallel.pp = 9", "model.layers is 6", "at most 6")),
    Bad("patience without end", "resilience:\n  hang_floor_s: 700\n", 2, ("resilience.hang_floor_s = 700", "at most")),
    Bad("floor above the rate", "optimizer:\n  min_lr: 0.1\n", 2, ("optimizer.min_lr = 0.1", "at most")),
    Bad("warm-up beyond the end", "train: {steps: 2}\noptimizer: {warmup_samples: 320}\n", 2, ("= 320", "the 32 samples")),
    Bad("both units of warm-up", "optimizer: {warmup_samples: 1, warmup_tokens: 256}\n", 1, ("warmup_tokens = 256", "not both")),
    Bad(
        "samples and other steps",
        "train: {samples: 160, steps: 7}\n",
        1,
        ("train.samples = 160", "are 10 steps, and train.steps is 7"),
    ),
    Bad(
        "ffn that tp does not cut",
        "model: {ffn_hidden: 101}\nparallel: {tp: 2}\n",
        1,
        ("model.ffn_hidden = 101", "nearest: 100, 102"),
    ),
    Bad("sequence that tp does not cut", "model: {seq_len: 33}\nparallel: {tp: 4}\n", 1, ("model.seq_len = 33", "nearest: 32, 36")),
    Bad("stages that miss layers", "parallel:\n  pp: 2\n  pp_layers: [2, 3]\n", 3, ("pp_layers = [2, 3]", "model.layers is 6")),
    Bad("stages of another number", "parallel:\n  pp: 2\n  pp_layers: [6]\n", 3, ("pp_layers = [6]", "1 stages", "are 2")),
    Bad(
        "virtual stages of 1f1b",
        "parallel: {pp: 2, virtual_stages: 2}\n",
        1,
        ("virtual_stages = 2", "interleaved_1f1b, zero_bubble"),
    ),
    Bad("interleaved by one", "parallel: {pp: 2, virtual_stages: 1, schedule: interleaved_1f1b}\n", 1, ("virtual_stages = 1", "2")),
    Bad(
        "zero bubble, compiled", "parallel: {pp: 2, schedule: zero_bubble}\ntrain: {compile: true}\n", 2, ("train.compile", "false")
    ),
    Bad("tensor parallel, compiled", "parallel: {tp: 2}\ntrain: {compile: true}\n", 2, ("train.compile = true", "tp > 1", "auto")),
    Bad("zero bubble at ZeRO-3", "parallel: {pp: 2, schedule: zero_bubble, zero_stage: 3}\n", 1, ("zero_stage = 3", "1, 2")),
    Bad("context on the CPU", "cluster: {device: cpu}\nparallel: {cp: 2}\n", 2, ("parallel.cp = 2", "allowed: 1")),
    Bad("context and ALiBi", "parallel: {cp: 2}\nmodel: {position: alibi}\n", 2, ("model.position = alibi", "context parallelism")),
    Bad(
        "too few micro batches for the pipeline",
        "cluster: {procs_per_node: 4}\nparallel: {pp: 4}\ntrain: {global_batch_size: 8}\n",
        3,
        ("train.global_batch_size = 8", "2 micro batches", "at least pp = 4", "nearest: 16"),
    ),
    Bad(
        "a ramp-up that does not come out even",
        "cluster: {procs_per_node: 2}\ntrain: {batch_rampup: {start: 4, increment: 6, samples: 99}}\n",
        2,
        ("train.batch_rampup.increment = 6", "micro_batch_size = 4", "nearest: 4, 8"),
    ),
    Bad("no training split", "data:\n  split: [0, 1, 1]\n", 2, ("data.split", "above 0")),
    Bad("text and path", "data:\n  text: auto\n  path: a/b\n", 3, ("data.path", "not both")),
    Bad("neither text nor path", "data: {text: null}\n", 1, ("data.text", "data.path")),
    Bad("no files", "data: {text: []}\n", 1, ("data.text", "names no file")),
    Bad("half a tokenizer", "data:\n  tokenizer:\n    vocab_file: v.json\n", 2, ("merges_file is missing",)),
    Bad("more min_nodes than nodes", "cluster:\n  min_nodes: 2\n", 2, ("cluster.min_nodes = 2", "cluster.nodes = 1")),
    Bad(
        "domains without spares", "cluster: {spares: 1, domains: [a]}\n", 1, ("cluster.domains", "each of 2 nodes, spares included")
    ),
    Bad("variable that is not set", "run_dir: $NOWHERE/x\n", 1, ("run_dir = $NOWHERE/x", "NOWHERE is not set")),
    Bad("replicas of what is shared", "checkpoint: {tiers: [{name: a, path: /a, replicas: 1}]}\n", 1, ("shared by all nodes",)),
    Bad("two replicas", "checkpoint: {tiers: [{name: a, path: /a, replicas: 2}, {name: b, path: /b}]}\n", 1, ("0, or 1",)),
    Bad("two cadences", "checkpoint: {tiers: [{name: a, path: /a, every_s: 9, every_steps: 1}]}\n", 1, ("every_s = 9", "not both")),
    Bad("kept in a node", "checkpoint: {tiers: [{name: a, path: /a, keep_every: 9}, {name: b, path: /b}]}\n", 1, ("durable one",)),
    Bad("no bandwidth", "checkpoint: {tiers: [{name: a, path: /a, max_mib_s: 0}]}\n", 1, ("max_mib_s", "0")),
    Bad("domains of other nodes", "cluster: {nodes: 2, domains: [a]}\n", 1, ("cluster.domains", "each of 2 nodes")),
    # the file
    Bad("unclosed bracket", "train: {steps: 5\nname: x\n", 2, ("not valid YAML",)),
    Bad("tab", "train:\n\tsteps: 5\n", 2, ("not valid YAML",)),
    Bad("list instead of a mapping", "- a\n- b\n", 1, ("a mapping of keys to values",)),
    Bad("text instead of a mapping", "hello\n", 1, ("a mapping of keys to values",)),
    Bad("bytes that are no text", b"name: \xff\xfe\n", None, ("not UTF-8",)),
    Bad("unknown tag", "name: !!python/object:os.system x\n", 1, ("not valid YAML",)),
    Bad("alias of itself", "train: &a\n  steps: *a\n", 2, ("not valid YAML", "*a stands within what it stands for")),
    Bad("list within itself", "name: &a [*a]\n", 1, ("*a stands within",)),
    Bad("alias of nothing", "name: x\ntrain: *nowhere\n", 2, ("not valid YAML", "undefined alias")),
    Bad(
        "aliases of aliases",
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
        5,
        ("more than 50,000 values",),
    ),
    Bad(
        "merges of merges",
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
        None,
        ("more than 50,000 values",),
    ),
    Bad("lists 3,000 deep", "name: " + "[" * 3000 + "]" * 3000, 1, ("nested more than 32 deep",)),
    Bad("lists that do not end", "[" * 100_000, 1, ("nested more than 32 deep",)),
    Bad("mappings 3,000 deep", "".join(f"{' ' * n}a:\n" for n in range(1000)), 32, ("nested more than 32 deep",)),
    Bad("key that is a list", "? [a, b]\n: x\n", 1, ("not text",)),
    Bad("key that is null", "~: x\n", 1, ("not text",)),
    Bad("key that is a date", "train: {2001-01-01: x}\n", 1, ("not text",)),
    Bad("key of two lines", '"a\\nb": x\n', 1, ("a\\nb: unknown key",)),
    Bad("key that moves the cursor", '"\\e[2J": x\n', 1, ("\\x1b[2J: unknown key",)),
    Bad("number of 5,000 digits", f"train: {{steps: {'9' * 5000}}}\n", 1, ("a number of 5,000 characters", "at most 100")),
    Bad("number beyond all counts", f"train: {{steps: -{'9' * 90}}}\n", 1, ("train.steps = -9999", "at least 1")),
    Bad("number of base 60", "optimizer: {lr: " + "1:" * 4000 + "1.5}\n", 1, ("a number of 8,003 characters",)),
    Bad("day that is in no calendar", "name: 2001-99-99\n", None, ("not valid YAML", "month must be in 1..12")),
    Bad("number that is tagged as none", "train: {steps: !!int many}\n", 1, ("'many' cannot be tagged 'int'",)),
    Bad("number that is tagged and empty", 'train: {steps: !!int ""}\n', 1, ("cannot be tagged 'int'",)),
    Bad("NUL in a path", 'run_dir: "a\\0b"\n', 1, ("a text with a NUL",)),
    Bad("half a character", 'run_dir: "a\\uD800b"\n', 1, ("half a character",)),
    Bad("control character", "name: a\x07b\n", None, ("not valid YAML", "special characters are not allowed")),
    Bad("UTF-16", "name: x\n".encode("utf-16"), None, ("not UTF-8",)),
    Bad("Latin-1", "name: ä\n".encode("latin-1"), None, ("not UTF-8 text (byte 6)",)),
    Bad("two documents", "name: x\n---\nname: y\n", 2, ("not valid YAML", "another document")),
    Bad("more than is read", "#" * (1 << 20) + "\n", None, ("1,048,577 bytes", "at most 1,048,576")),
    # the command line
    Bad("override of an endless text", "", None, ("a whole number",), ("train.steps=" + "[" * 5000,)),
    Bad("override of itself", "", None, ("a whole number",), ("train.steps=&a [*a]",)),
    Bad("override 3,000 deep", "", None, ("command line", "KEY=VALUE"), (".".join("a" * 3000) + "=1",)),
    Bad("override of place ²", "data: {split: [1, 1, 1]}\n", None, ("no entry",), ("data.split.²=1",)),
    Bad("override of a far place", "data: {split: [1, 1, 1]}\n", None, ("no entry",), ("data.split." + "9" * 5000 + "=1",)),
    Bad("override without value", "", None, ("command line", "'train.steps'", "KEY=VALUE"), ("train.steps",)),
    Bad("override of nothing", "", None, ("command line", "'=5'"), ("=5",)),
    Bad("wrong override", "", None, ("command line: train.steps = x", "a whole number"), ("train.steps=x",)),
    Bad("unknown override", "", None, ("command line: train.stepz", "'steps'"), ("train.stepz=1",)),
    Bad("override beyond a list", "", None, ("command line", "checkpoint.tiers"), ("checkpoint.tiers.0.keep_last=1",)),
]


def message(tmp_path: Path, bad: Bad) -> tuple[Path, str]:
    path = tmp_path / "bad.yaml"
    path.write_bytes(bad.text if isinstance(bad.text, bytes) else bad.text.encode())
    with pytest.raises(ConfigError) as error:
        load(path, bad.overrides, {})
    return path, str(error.value)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_malformed_config_is_told_with_its_place_and_what_is_allowed(tmp_path: Path, bad: Bad):
    path, text = message(tmp_path, bad)
    (line,) = text.splitlines()
    for words in bad.says:
        assert words in line
    if bad.line is not None:
        assert line.startswith(f"{path}:{bad.line}: ")
    for jargon in ("Input should be", "pydantic", "validation error", "type=", "https://"):
        assert jargon not in text


def test_there_are_enough_of_them():
    assert len(BAD) >= 90
    assert len({bad.name for bad in BAD}) == len(BAD)


def test_all_problems_are_told_at_once_in_the_order_of_lines(tmp_path: Path):
    bad = Bad("", "train: {steps: 0}\nname: a/b\nmodle: {}\noptimizer:\n  lr: x\n", None, ())
    path, text = message(tmp_path, bad)
    assert [line.split(": ")[0] for line in text.splitlines()] == [f"{path}:{number}" for number in (1, 2, 3, 5)]


def test_a_thousand_problems_are_not_told_one_by_one(tmp_path: Path):
    bad = Bad("", f"cluster:\n  domains: [{', '.join(['1'] * 1000)}]\n", None, ())
    _, text = message(tmp_path, bad)
    *told, last = text.splitlines()
    assert len(told) == 50
    assert "more problems" in last


@pytest.mark.parametrize("make", ["missing", "directory", "unreadable", "pipe", "endless", "sparse"])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, make: str):
    path = tmp_path / "config.yaml"
    if make == "directory":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    elif make == "endless":
        path.symlink_to("/dev/zero")
    elif make == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 30)
    elif make == "unreadable":
        if os.geteuid() == 0:
            path.symlink_to(path)  # root reads everything but a loop
        else:
            path.write_text("")
            path.chmod(0)
    with pytest.raises(ConfigError, match=str(path)):
        load(path)


def test_a_run_directory_whose_name_is_no_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = os.fsencode(tmp_path) + b"/gr\xf6\xdfe"  # Latin-1
    os.mkdir(folder)  # noqa: PTH102 - a path of bytes
    (tmp_path / "run.yaml").write_text("name: toy\n")
    monkeypatch.chdir(os.fsdecode(folder))
    with pytest.raises(ConfigError, match=rf"run_dir: {tmp_path}/gr\\xf6\\xdfe/runs/toy has bytes that are not UTF-8"):
        load(tmp_path / "run.yaml")
    assert load(tmp_path / "run.yaml", [f"run_dir={tmp_path}/größe"]).run_dir == tmp_path / "größe"


@pytest.mark.parametrize("named", ["in the file", "as a word"])
def test_a_run_directory_that_the_locale_cannot_name_is_refused_with_what_to_set(tmp_path: Path, named: str):
    (tmp_path / "run.yaml").write_text("run_dir: größe\n" if named == "in the file" else "name: toy\n", encoding="utf-8")
    words = [sys.executable, "-m", "resilient", "plan", "run.yaml", *(["run_dir=größe"] if named == "as a word" else [])]
    environ = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(words, capture_output=True, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == 78 and b"Traceback" not in done.stderr
    assert b"cannot be used while names of files are ascii, as the locale says; set LC_ALL=C.UTF-8 or PYTHONUTF8=1" in done.stderr
    assert b"not UTF-8" not in done.stderr
    done = subprocess.run([*words, "run_dir=plain"], capture_output=True, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("command", ["run", "plan"])
def test_the_command_ends_with_78_and_without_a_traceback(tmp_path: Path, command: str):
    path = tmp_path / "bad.yaml"
    path.write_text("train:\n  step: 5\n")
    done = subprocess.run(
        [sys.executable, "-m", "resilient", command, str(path)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 78
    assert f"{path}:2: train.step: unknown key" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert sorted(tmp_path.iterdir()) == [path]  # nothing was made


@pytest.mark.parametrize("kind", soaked_after(1, ["alias of itself", "lists 3,000 deep", "pipe"]))
def test_the_command_ends_with_78_for_what_is_no_document(tmp_path: Path, kind: str):
    path = tmp_path / "bad.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        (bad,) = [each for each in BAD if each.name == kind]
        path.write_text(str(bad.text))
    done = subprocess.run(
        [sys.executable, "-m", "resilient", "run", str(path)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{path}:")
    assert sorted(tmp_path.iterdir()) == [path]
