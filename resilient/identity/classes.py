"""What becomes of a campaign whose config has changed, key by key: the one table.

`free`: the numbers do not depend on it. `told`: it may be changed on the way, as a learning rate is; a line on the terminal and one
in the ledger say so. `refused`: the checkpoints were trained with it, and another value makes another campaign.

Owns the table. Pure.
"""

from collections.abc import Mapping
from typing import Literal

Kind = Literal["free", "told", "refused"]

# Sections of which nothing touches the numbers, whatever key is added to them.
_FREE_SECTIONS = ("checkpoint", "resilience", "network", "slurm", "chaos", "logging")

_KEYS: Mapping[Kind, Mapping[str, str]] = {
    "free": {
        "": "name run_dir run_dir_mode",
        "cluster": "launcher nodes procs_per_node min_procs_per_node domains spares min_nodes binding fabric tls",
        "parallel": "dp_shard",  # dp and dp_replicate say what it comes to
        "train": "steps samples exit_duration_min eval_interval eval_iters",
    },
    "told": {
        "": "entrypoint args",
        "cluster": "device threads_per_proc gpu_memory_gib",
        "parallel": "tp cp pp dp dp_replicate sequence_parallel async_tp schedule virtual_stages pp_layers zero_stage "
        "reduce_gradients",
        "model": "attention",
        "train": "global_batch_size micro_batch_size batch_rampup precision grad_dtype recompute recompute_every compile "
        "deterministic",
        "train.guard": "not_finite spike window max_skips",
        "optimizer": "lr min_lr schedule warmup_samples warmup_tokens decay_samples decay_tokens wsd_fraction weight_decay "
        "clip_grad",
    },
    "refused": {
        "": "seed",
        "model": "layers hidden heads kv_heads ffn_hidden seq_len vocab_size vocab_multiple position rope_theta norm norm_eps mlp "
        "bias dropout attention_dropout tie_embeddings init_std depth_scaled_init mup_base_hidden",
        "data": "text path mask_documents mask_end_of_text end_of_text split",
        "data.tokenizer": "vocab_size vocab_file merges_file",
        "optimizer": "name beta1 beta2 beta3 momentum eps",  # the moments in the checkpoints are those of these
    },
}

CLASSES: Mapping[str, Kind] = {
    **dict.fromkeys(_FREE_SECTIONS, "free"),
    **{
        f"{section}.{name}" if section else name: kind
        for kind, sections in _KEYS.items()
        for section, names in sections.items()
        for name in names.split()
    },
}
"""Dotted keys, and the sections that are free as a whole."""

SCRIPT_KEYS = ("entrypoint", "args", "cluster.device", "cluster.threads_per_proc")
"""Those that a script or a module run as a program can notice; all else is its own affair."""

FILES = ("data.text", "data.path", "data.tokenizer.vocab_file", "data.tokenizer.merges_file")
"""Keys that name files, and are compared by what is in them."""


def kind_of(key: str) -> Kind:
    """The class of a dotted key, of a key inside of one, or of what is no key (`versions.torch`): told."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        found = CLASSES.get(".".join(parts[:end]))
        if found is not None:
            return found
    return "told"
