"""The pipe: every message comes through whole however it is cut, nothing else comes through at all,
and an engine process does not outlive the one it works for."""

from __future__ import annotations

import json
import random
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from strata.serve.jobs import Job, Jobs, QueueFull
from strata.serve.messages import (
    Cancel,
    Counters,
    End,
    Failed,
    Frames,
    Generate,
    Load,
    Message,
    Phase,
    Ping,
    Pong,
    PromptLogprobs,
    ProtocolError,
    Reading,
    Ready,
    Stop,
    Tokens,
    encode,
)

EVERY: list[Message] = [
    Load("m.gguf", {"spec": 4, "stop": ["\ud800", "é"]}, {"spec": "--spec"}),
    Generate(1, [1, 2, 3], {"seed": 2**64 - 1}, constraint={"kind": "regex", "value": "a+"}),
    Cancel(1),
    Ping(5),
    Stop(),
    Phase("experts", 1, 1 << 50),
    Ready({"context_tokens": 4096}),
    Failed("no", True),
    Pong(5, 99),
    Reading(1, 5, 10),
    Tokens(1, [[7, "\N{GRINNING FACE}"], [8, "", -0.5, [[8, -0.5]]]]),
    PromptLogprobs(1, 0, [[None, []]]),
    End(1, "stop", {"prompt_s": 0.1}),
    Counters({"rows": {"CPU": [1, 2]}}),
]


@pytest.mark.parametrize("seed", range(5))
def test_messages_come_through_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    data = b"".join(map(encode, EVERY))
    frames, got, at = Frames(), [], 0
    while at < len(data):
        n = rng.choice([1, 3, 4, 50, 1000])
        got += list(frames.feed(data[at : at + n]))
        at += n
    assert got == EVERY


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'["Load"]', b'["Nobody",1]', b'["Ping",1,2]', b"\xff", b'[["Ping"],1]'],
)
def test_what_is_no_message_is_an_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Frames().feed(struct.pack("<I", len(body)) + body))


def test_a_frame_that_claims_gigabytes_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="claims"):
        list(Frames().feed(struct.pack("<I", 1 << 31)))


def test_an_engine_ends_when_nobody_listens(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": []}))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "strata.serve.scripted", str(script), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.sendall(encode(Load("x", {}, {})))
        frames = Frames()
        got: list[Message] = []
        while not any(isinstance(message, Ready) for message in got):
            got += list(frames.feed(ours.recv(65536)))
    assert process.wait(20) == 0


def test_the_queue_keeps_its_order_and_ends_every_job_once() -> None:
    started: list[int] = []
    ended: list[tuple[int, str]] = []
    jobs = Jobs(3, lambda job: started.append(job.request.id), lambda job: None)
    jobs.on_end = lambda job, end: ended.append((job.request.id, end.finish))
    many = [Job(Generate(jobs.new_id(), [1], {})) for _ in range(5)]
    for job in many[:3]:
        jobs.add(job)
    with pytest.raises(QueueFull):
        jobs.add(many[3])
    assert started == [] and [jobs.position(job) for job in many[:3]] == [1, 2, 3]
    jobs.open()
    assert started == [1] and [jobs.position(job) for job in many[:3]] == [0, 1, 2]
    jobs.cancel(many[1])
    jobs.cancel(many[1])
    jobs.event(End(99, "stop"))  # of an engine that is gone
    jobs.close("died")
    assert ended == [(2, "cancelled"), (1, "error")]
    jobs.open()
    jobs.event(End(3, "stop"))
    assert started == [1, 3] and ended[-1] == (3, "stop")
    assert all(sum(i == job for i, _ in ended) == 1 for job in (1, 2, 3))
