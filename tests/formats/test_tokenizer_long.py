"""Long texts: the same ids as short ones give, and other threads go on meanwhile.

Expectations: ids of the whole are the ids of its lines where lines end in a way that no token
spans; the thread counts how often it was let run (with the interpreter lock held throughout it
would be about once).
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from strata.formats.checkpoint import open_checkpoint
from strata.formats.tokenizer import Tokenizer, load_tokenizer

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-flash-next-Q8_0.gguf"
LINE = "The ls command lists the files of a directory.\n"


def tokenizer() -> Tokenizer:
    with open_checkpoint(MODEL) as checkpoint:
        return load_tokenizer(checkpoint)


def test_a_long_text_has_the_ids_of_its_lines() -> None:
    cut = tokenizer()
    one = cut.encode(LINE, add_bos=False)
    assert cut.encode(LINE * 2, add_bos=False) == one * 2
    assert cut.encode(LINE * 400, add_bos=False) == one * 400


def test_other_threads_run_while_a_long_text_is_cut() -> None:
    cut = tokenizer()
    done, counted = threading.Event(), 0

    def work() -> None:
        cut.encode(LINE * 8000, add_bos=False)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        counted += 1
    thread.join()
    assert counted > 10
