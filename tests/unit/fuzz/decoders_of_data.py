"""Datasets, tokenizers, and checkpoints of others."""

import io
import json
from dataclasses import asdict
from pathlib import Path

from decoder import Decoder, in_file


def data(directory: Path) -> list[Decoder]:
    from trainer import kernels
    from trainer.data import documents, indexed
    from trainer.data.errors import DataError
    from trainer.evaluation.records import FILE, Records
    from trainer.evaluation.sizes import token_sizes
    from trainer.sources import tokens_of

    prefix = directory / "data" / "corpus"
    prefix.parent.mkdir()

    def index() -> list[bytes]:
        with indexed.IndexedWriter(prefix, indexed.token_type(300)) as writer:
            for length in (3, 1, 20):
                writer.add(list(range(length)))
            writer.commit()
        return [indexed.idx_path(prefix).read_bytes()]

    def opened(_: Path) -> object:
        found = indexed.IndexedDataset(prefix)
        return [found.tokens[found.boundary(each) : found.boundary(each + 1)].sum() for each in range(len(found))]

    vocab = {"a": 0, "b": 1, "<|endoftext|>": 2}
    saved = json.dumps(
        {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": [{"id": 2, "content": "<|endoftext|>"}]}
    ).encode()

    def tokens(path: Path) -> object:
        from trainer import sources

        sources._tokens_in.cache_clear()
        return tokens_of(path), token_sizes(path, 300)

    line = {
        "step": 40,
        "t": 1.5,
        "text": "valid",
        "tokens": 384,
        "loss": 2.5,
        "bits_per_byte": None,
        "corpora": {"a": {"loss": 2.5}},
    }

    def evaluated(_: Path) -> object:
        return Records(directory).steps("valid")

    work = kernels.Work("cpu", "2", "bfloat16", 4, 8, 8, 64, 512, False, 0.0, False, False)
    choice = {"work": asdict(work), "kernel": "sdpa_flash", "seconds": {"sdpa_flash": 1e-3}}

    return [
        Decoder(
            "attention.json",
            lambda: [json.dumps(choice).encode()],
            in_file(directory / kernels.FILE, lambda path: kernels.remembered(path, work)),
        ),
        Decoder("evaluations.jsonl", lambda: [json.dumps(line).encode() + b"\n"], in_file(directory / FILE, evaluated)),
        Decoder("index of a dataset", index, in_file(indexed.idx_path(prefix), opened), (DataError,)),
        Decoder(
            "tokenizer.json",
            lambda: [saved, json.dumps(vocab).encode(), json.dumps({chr(256 + byte): byte for byte in range(300)}).encode()],
            in_file(directory / "tokenizer.json", tokens),
            (DataError,),
        ),
        Decoder(
            "line of text",
            lambda: [b'{"text": "x", "meta": {"a": [1]}}'],
            lambda data: documents.text_of(documents.Piece("x.jsonl", 2, "text", data, True)),
            (DataError,),
        ),
    ]


def foreign(directory: Path) -> list[Decoder]:
    """Files of Megatron-LM and of torch.distributed.checkpoint."""
    import argparse
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from trainer.conversion.dcp_files import DCPFiles
    from trainer.conversion.families import ImportRefused
    from trainer.conversion.megatron_args import model_of
    from trainer.conversion.pickled import load_part
    from trainer.conversion.rank_files import RankFiles

    matrix, vector = torch.arange(12.0).reshape(3, 4), torch.ones(4)

    def saved(value: object) -> bytes:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    def of_rank() -> list[bytes]:
        args = argparse.Namespace(hidden_size=4, swiglu=False, params_dtype=torch.bfloat16)
        model = {"decoder.layers.0.input_layernorm.weight": vector, "embedding.word_embeddings.weight": matrix}
        moments = {0: {"exp_avg": matrix + 1, "exp_avg_sq": matrix + 2}, 1: {"exp_avg": vector, "exp_avg_sq": vector * 2}}
        optimizer = {"state": moments, "param_groups": [{"params": [0]}, {"params": [1]}]}
        common = {"args": args, "iteration": 3, "checkpoint_version": 3.0}
        old = {"language_model": {"encoder": {"layers.0.input_norm.weight": vector}}}
        return [saved({**common, "model": model, "optimizer": optimizer}), saved({**common, "model": old})]

    def ranks(path: Path) -> None:
        opened = RankFiles(path.parents[1])
        for name in opened.names:
            for kind in ("weight", *opened.kinds):
                assert opened.read(name, kind).sum() is not None

    chunks = [saved(matrix[:1].clone()), saved(matrix[1:].clone())]
    distributed = directory / "dcp"

    def description() -> list[bytes]:
        blocks = [ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([rows, 4])) for start, rows in ((0, 1), (1, 2))]
        tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([3, 4]), blocks)
        places = {
            MetadataIndex("a", block.offsets, number): _StorageInfo("__0_0.distcp", number * len(chunks[0]), len(chunks[number]))
            for number, block in enumerate(blocks)
        }
        return [pickle.dumps(Metadata({"a": tensor}, {"a": ("a",)}, places)), pickle.dumps(Metadata({}, None, {}), 2)]

    def described(path: Path) -> None:
        (distributed / "__0_0.distcp").write_bytes(b"".join(chunks))
        opened = DCPFiles(path.parent)
        for name in opened.tensors:
            assert opened.read(name).sum() is not None

    def part(path: Path) -> None:
        load_part(path, 0, max(1, path.stat().st_size))

    def arguments(data: bytes) -> object:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return model_of(found) if isinstance(found, dict) else None

    gpt = {
        **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "kv_channels": 4},
        **{"max_position_embeddings": 8, "padded_vocab_size": 64, "vocab_size": 61, "make_vocab_size_divisible_by": 64},
        **{"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "num_query_groups": 2},
        **{"group_query_attention": True, "add_bias_linear": False, "rotary_base": 10000, "norm_epsilon": 1e-5},
    }
    rank = directory / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    return [
        Decoder("file of a rank of Megatron-LM", of_rank, in_file(rank, ranks), (ImportRefused, OSError)),
        Decoder("description of DCP", description, in_file(distributed / ".metadata", described), (ImportRefused, OSError)),
        Decoder("chunk of DCP", lambda: chunks, in_file(directory / "part", part), (ImportRefused, OSError)),
        Decoder("arguments of Megatron-LM", lambda: [json.dumps(gpt).encode()], arguments, (ImportRefused,)),
    ]
