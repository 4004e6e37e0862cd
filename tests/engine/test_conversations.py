"""What is kept of conversations: right reuse in every order, and files that are refused when
anything about them is wrong.

The tiny state's contents are a function of the tokens it was fed (``Fed``), so a state that is not
exactly that of its tokens is seen at once; the expectation is the same function on a fresh state.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from strata.core.errors import FormatError, SettingError
from strata.engine.conversation_file import ConversationFolder, read_kept, write_kept
from strata.engine.conversations import Conversations, common_prefix
from strata.engine.events import Reuse
from strata.memory.state import Image, SequenceState, Snapshot, StateSpec

CHUNK, CONTEXT = 8, 200
SPECS = [
    {
        "kv": StateSpec("positional", (3,), torch.float32),
        "blocks": StateSpec("positional", (2,), torch.float32, stride_tokens=4),
        "ring": StateSpec("ring", (2,), torch.float32, ring_entries=4),
        "sum": StateSpec("recurrent", (2,), torch.float64),
    }
]
IDENTITY = {"model": "m", "--kv": "f32"}


class Fed:
    """An engine whose state says what it was fed."""

    def __init__(self) -> None:
        self.state = SequenceState(SPECS, CONTEXT, torch.device("cpu"))
        self.fed = 0

    def reset(self) -> None:
        self.state.reset()

    def restore(self, snapshot: Snapshot) -> None:
        self.state.restore(snapshot)

    def adopt(self, image: Image) -> None:
        self.state.adopt(image)

    def feed(self, token: int) -> None:
        state, at = self.state, self.state.length
        state.tensor(0, "kv")[at] = float(token)
        state.tensor(0, "blocks")[at // 4] = float(token)
        state.tensor(0, "ring")[at % 4] = float(token)
        total = state.front(0, "sum")
        total.copy_(total * 1.5 + token)
        state.tokens.append(token)
        self.fed += 1

    def right(self) -> bool:
        """Whether the state is that of its tokens."""
        fresh = Fed()
        for token in self.state.tokens:
            fresh.feed(token)
        mine, theirs = self.state.image(), fresh.state.image()
        return all(torch.equal(mine.tensors[k], theirs.tensors[k]) for k in theirs.tensors)


def ask(kept: Conversations, engine: Fed, prompt: Sequence[int], answer: Sequence[int]) -> Reuse:
    """One turn as a session does it."""
    reuse = kept.arrange(prompt)
    assert engine.state.tokens == list(prompt[: reuse.reused_tokens])
    assert engine.right()
    tell = kept.reading(prompt, reuse, None)
    for at in range(reuse.reused_tokens, len(prompt)):
        engine.feed(prompt[at])
        if (at + 1) % CHUNK == 0 or at + 1 == len(prompt):
            tell(at + 1 - reuse.reused_tokens, len(prompt) - reuse.reused_tokens)
    kept.set_row(np.zeros(1, np.float32))
    for token in answer:
        kept.wrote_window()
        engine.feed(token)
    return reuse


def made(engine: Fed, **more: object) -> Conversations:
    given = {"chunk_tokens": CHUNK, "n_checkpoints": 4, "park_bytes": 1 << 20, **more}
    return Conversations(engine, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("park_bytes", [0, 20_000, 1 << 20])
def test_any_order_of_prompts_gives_the_state_of_a_fresh_start(seed: int, park_bytes: int) -> None:
    rng = random.Random(seed)
    engine = Fed()
    kept = made(engine, park_bytes=park_bytes, n_checkpoints=rng.choice([0, 1, 4]))
    texts = [[rng.randrange(9) for _ in range(rng.randrange(5, 60))] for _ in range(4)]
    for _ in range(30):
        text = rng.choice(texts)
        cut = rng.randrange(1, len(text) + 1) if rng.random() < 0.4 else len(text)
        prompt = text[:cut]
        if rng.random() < 0.3:
            prompt = [*prompt, *(rng.randrange(9) for _ in range(rng.randrange(1, 9)))]
        answer = [rng.randrange(9) for _ in range(rng.randrange(4))]
        reuse = ask(kept, engine, prompt, answer)
        assert engine.right()
        assert reuse.reused_tokens <= len(prompt)
        if rng.random() < 0.5 and len(prompt) + len(answer) < 120:
            texts[texts.index(text)] = [*prompt, *answer]
        assert kept.parked_bytes <= max(park_bytes, 0)
        assert len(kept.live.checkpoints) <= 4


def test_the_same_prompt_rereads_at_most_a_chunk_and_a_change_is_named() -> None:
    engine = Fed()
    kept = made(engine)
    prompt = list(range(50))
    ask(kept, engine, prompt, [1, 2, 3])
    again = ask(kept, engine, prompt, [])
    assert again == Reuse(50, 48)
    changed = [*prompt[:30], 99, *prompt[31:]]
    reuse = ask(kept, engine, changed, [])
    assert (reuse.first_difference, reuse.reused_tokens) == (30, 24)
    assert ask(kept, engine, [*changed[:30], 98], []) == Reuse(31, 24, 30)


def test_another_conversation_is_parked_and_found_again() -> None:
    engine = Fed()
    kept = made(engine)
    one, two = list(range(40)), [100 + i for i in range(40)]
    ask(kept, engine, one, [7])
    ask(kept, engine, two, [8])
    assert len(kept.parked) == 1
    assert ask(kept, engine, [*one, 7, 5], []).reused_tokens == 41
    assert ask(kept, engine, [*two, 8, 5], []).reused_tokens == 41


def test_windows_that_change_the_output_are_reported_or_read_again() -> None:
    engine = Fed()
    kept = made(engine, exact_windows=False)
    ask(kept, engine, list(range(20)), [1, 2, 3, 4])
    turn = [*range(20), 1, 2, 3, 4, 5]
    assert ask(kept, engine, turn, []).inexact_tokens == 4
    engine = Fed()
    kept = made(engine, exact_windows=False, reuse_inexact=False)
    ask(kept, engine, list(range(20)), [1, 2, 3, 4])
    assert ask(kept, engine, turn, []) == Reuse(25, 16)


def test_a_cancelled_prompt_goes_back_to_a_checkpoint() -> None:
    engine = Fed()
    kept = made(engine)
    prompt = list(range(40))
    reuse = kept.arrange(prompt)
    tell = kept.reading(prompt, reuse, None)
    for token in prompt[:35]:
        engine.feed(token)
        if engine.state.length % CHUNK == 0:
            tell(engine.state.length, 40)
    assert kept.rewind() and engine.right() and engine.state.length == 32


def stored(folder: Path) -> tuple[Path, Fed]:
    """A folder with one conversation, and the engine it is from."""
    engine = Fed()
    kept = made(engine, folder=ConversationFolder(folder, engine.state, IDENTITY))
    ask(kept, engine, list(range(40)), [7])
    assert kept.save() == 1
    (path,) = folder.glob("*.conversation")
    assert path.stat().st_mode & 0o077 == 0
    return path, engine


def test_a_file_brings_the_conversation_back(tmp_path: Path) -> None:
    stored(tmp_path)
    engine = Fed()
    kept = made(engine, folder=ConversationFolder(tmp_path, engine.state, IDENTITY))
    assert ask(kept, engine, [*range(40), 7, 5], [6]).reused_tokens == 41
    assert kept.save() == 1
    assert len(list(tmp_path.glob("*.conversation"))) == 1  # the longer one replaced the shorter


def test_a_file_brings_an_earlier_point_back(tmp_path: Path) -> None:
    """A prompt that leaves the stored text early goes on from a checkpoint of the file; ``ask``
    compares the state with a fresh start."""
    stored(tmp_path)
    engine = Fed()
    kept = made(engine, folder=ConversationFolder(tmp_path, engine.state, IDENTITY))
    reuse = ask(kept, engine, [*range(35), 8, 8, 8], [6])
    assert 0 < reuse.reused_tokens < 35 and engine.right()


def test_every_damaged_byte_is_refused_before_the_engine_sees_it(tmp_path: Path) -> None:
    """Each byte of the header, and a sample of the tensors' bytes; cuts and additions."""
    path, engine = stored(tmp_path)
    good = path.read_bytes()
    before = engine.state.image()
    places = [*range(0, 700, 9), *range(700, len(good), 97), len(good) - 1]
    damaged = [good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :] for at in places]
    damaged += [good[:at] for at in (0, 5, 12, 60, 400, len(good) - 1)] + [good + b"\0"]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(FormatError):
            read_kept(path, engine.state.specs, IDENTITY, CONTEXT)
        folder = ConversationFolder(tmp_path, engine.state, IDENTITY)
        for kept in folder.stored():
            assert folder.load(kept) is None
    after = engine.state.image()
    assert all(torch.equal(before.tensors[k], after.tensors[k]) for k in before.tensors)
    path.write_bytes(good)
    assert read_kept(path, engine.state.specs, IDENTITY, CONTEXT).tokens[:40] == tuple(range(40))


def test_a_folder_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    """Found at the start, so that the caller mends it, and not when a conversation is kept."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SettingError, match=f"--park-dir {folder}: .*written"):
            ConversationFolder(folder, Fed().state, IDENTITY)


def test_files_of_another_model_settings_or_shape_are_refused(tmp_path: Path) -> None:
    path, engine = stored(tmp_path)
    for other in ({**IDENTITY, "model": "n"}, {**IDENTITY, "--kv": "f16"}, {"model": "m"}):
        with pytest.raises(FormatError, match="another|--kv|model"):
            read_kept(path, engine.state.specs, other, CONTEXT)
    with pytest.raises(FormatError, match="tokens"):
        read_kept(path, engine.state.specs, IDENTITY, 20)
    narrow = {(0, "kv"): StateSpec("positional", (1,), torch.float32)}
    with pytest.raises(FormatError, match="bytes"):
        read_kept(path, narrow, IDENTITY, CONTEXT)


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, engine = stored(tmp_path)
    good = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    kept = read_kept(path, engine.state.specs, IDENTITY, CONTEXT)
    with pytest.raises(OSError):
        write_kept(path, kept, engine.state.specs, IDENTITY)
    assert path.read_bytes() == good


def test_common_prefix() -> None:
    rng = random.Random(1)
    for _ in range(200):
        a = [rng.randrange(2) for _ in range(rng.randrange(12))]
        b = [rng.randrange(2) for _ in range(rng.randrange(12))]
        slow = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        assert common_prefix(a, b) == (min(len(a), len(b)) if slow is None else slow)
