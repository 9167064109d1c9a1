"""What a config asks for: the corpus of the quickstart, and data that several processes prepare at once."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from datasets_of_text import contents, put, texts_of

from trainer.data import DataError, corpus, open_split, prepare
from trainer.data.build import Prepared


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare("auto", tmp_path_factory.mktemp("quickstart") / "data", vocab_size=1000, workers=2)


@pytest.mark.soak
def test_the_corpus_is_enough_prose_for_the_quickstart(quickstart: Prepared) -> None:
    assert quickstart.vocab_size == 1000
    assert quickstart.documents > 400
    assert quickstart.tokens > 400_000
    for which in ("train", "valid", "test"):
        samples = open_split([(quickstart.prefix, 1.0)], (949, 50, 1), which, 256, 42, vocab_size=1000)
        assert samples.get(np.arange(len(samples))).shape == (len(samples), 257)
    text = " ".join(texts_of(quickstart.prefix)).lower()
    assert all(f" {word} " in text for word in ("the", "of", "statement", "returns", "object"))


@pytest.mark.soak
def test_what_is_prepared_is_prepared_once(quickstart: Prepared) -> None:
    before = contents(quickstart.prefix.parent)
    again = prepare("auto", quickstart.prefix.parent, vocab_size=1000, workers=2)
    assert again.reused
    assert contents(quickstart.prefix.parent) == before


def test_the_corpus_is_the_same_every_time_and_a_limit_cuts_its_end() -> None:
    library = Path(sysconfig.get_path("stdlib")) / "concurrent"
    whole = corpus.documents(library=library)
    assert len(whole) > 3
    assert whole == corpus.documents(library=library)
    assert whole[:2] == corpus.documents(sum(len(text.encode()) for text in whole[:2]), library)


def test_the_corpus_leaves_out_what_does_not_belong_to_it(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "test/d.py", "a/site-packages/e.py", "a/tests/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        put(tmp_path / name, f'"""Of {name}."""\ndef f():\n    """Its f."""\n')
    put(tmp_path / "broken.py", '"""Not Python.\n')
    put(tmp_path / "silent.py", "x = 1\n")
    put(tmp_path / "surrogate.py", '"""\\ud800"""\n')
    (tmp_path / "pydoc_data").mkdir()
    put(tmp_path / "pydoc_data/topics.py", "topics = {'x': 'A ' 'topic.'}\n")
    assert sorted(corpus.documents(library=tmp_path)) == ["A topic.", "Of a/c.py.\n\nIts f.", "Of b.py.\n\nIts f."]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no sources of the standard library"):
        corpus.documents(library=tmp_path / "empty")


def test_processes_that_prepare_at_once_make_one_dataset(tmp_path: Path, words: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer.data import prepare;"
        "print(prepare([Path(sys.argv[1])], Path(sys.argv[2]), vocab_size=300).reused)"
    )
    command = [sys.executable, "-c", code, str(words), str(tmp_path / "data")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = sorted(process.communicate()[0] for process in processes)
    assert said == ["False\n", "True\n", "True\n", "True\n"]
    assert sorted(contents(tmp_path / "data")) == ["corpus.bin", "corpus.idx", "corpus.json", "corpus.tokenizer.json"]


def test_data_is_prepared_without_torch_and_imported_without_numpy() -> None:
    code = "import sys, trainer.data.cli; assert 'numpy' not in sys.modules; from trainer.data import prepare, open_split;"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
