"""Rows 2 and 8 to 12 of the fault plan: how a run ends after signals, and where it waits for what hangs."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import harness
import pytest
from harness import begin, ended, setting

from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.metrics import read_results

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138}
LAST = "run/checkpoints/last.ckpt"
SLOW = "0:*:batch_start:SLEEP,0:*:val:SLEEP"
SECONDS = 4.0
"""Of the watchdog."""
WATCHED = f"--watchdog_minutes={SECONDS / 60}"
CASES = 20
"""Times of each case that has ever failed; the others have three."""


def wait_for(what: str, happened: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def trains(folder: Path, rank: int = 0, batches: int = 9) -> Callable[[], bool]:
    witness = folder / f"witness{rank}.jsonl"
    return lambda: witness.exists() and witness.read_text().count("\n") >= batches


def second_ranks(first: int) -> list[int]:
    """The second rank, once it is a new program: until then it may be another process that the first one forks."""
    found = []
    for pid in harness.children(first):
        with contextlib.suppress(OSError):
            found += [pid] if b"\0LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes() else []
    return found


def nothing_is_left(folder: Path, seconds: float = 30.0) -> None:
    wait_for("a process is left", lambda: not harness.orphans(folder), seconds)


def is_whole(folder: Path, code: int) -> None:
    """Checks what a signal has left: no process, no partial file, no traceback, a checkpoint of the last step."""
    nothing_is_left(folder, 5.0)
    said = harness.log(folder)
    assert "Traceback" not in said, said
    assert not [*folder.glob("run/.*.part"), *folder.glob("run/checkpoints/.*")]
    witness = folder / "witness0.jsonl"
    trained = len(witness.read_text().splitlines()) if witness.exists() else 0
    assert (folder / LAST).exists() == (trained > 0), said
    if trained:
        assert read_checkpoint(folder / LAST)["global_step"] == trained
    silent = code == 0 or read_results(folder / "run") or not (folder / "run").exists()
    assert said.count("stopped") == 1 or silent, said


def go_on(folder: Path, whole: dict[str, object], flags: tuple[str, ...]) -> None:
    """Checks that the run resumes, unless it has finished, and ends as the one that nothing stopped."""
    if read_results(folder / "run"):
        assert not harness.differences(whole, harness.outcome(folder))
        return
    resumes = (folder / "run/config.yaml").exists()
    process = begin(folder, *(("fit", "--resume=run", "--watchdog_minutes=30") if resumes else flags))
    assert ended(process, 120) == 0, harness.log(folder)
    assert not harness.differences(whole, harness.outcome(folder))


@pytest.fixture(scope="module")
def wholes(tmp_path_factory, finished, whole):
    """What each setting leads to when nothing stops it, and its seconds; workers and saves change none of it."""
    seconds = read_results(finished / "run")["seconds"] + 1.0
    known = {setting(workers, ranks=1): (whole, seconds) for workers in (0, 2)}

    def outcome(flags: tuple[str, ...]) -> tuple[dict[str, object], float]:
        if flags not in known:
            folder, started = tmp_path_factory.mktemp("whole"), time.monotonic()
            assert ended(begin(folder, *flags), 120) == 0, harness.log(folder)
            seconds = time.monotonic() - started
            known[flags] = harness.outcome(folder), seconds
        return known[flags]

    return outcome


WHO = ("group", "rank 0", "rank 1")
LIMIT = 30.0
"""Seconds from a fault on in which a run has ended."""


def ended_after_fault(process: BaseProcess, folder: Path) -> int:
    """Returns the exit code, and checks the seconds since the fault."""
    code = ended(process, 120)
    seconds = time.monotonic() - float((folder / "fault").read_text())
    print(f"ended {seconds:.1f} s after the fault")
    assert seconds < LIMIT
    return code


def signals() -> Iterator[tuple[str, int, int, int]]:
    """Yields faults, workers, ranks, and which time it is: one rank with workers or in a slow step, two, a dead one."""
    for again in range(3):
        for n, point in enumerate(("0:setup", "0:sanity", "12:batch_start", "16:val", "24:epoch_end", "32:test")):
            yield f"0:{point}:GROUP_{('TERM', 'INT', 'USR1')[(n + again) % 3]}", 2, 1, again
        yield "0:11:forward:SLOW_TERM", 0, 1, again
        for n, point in enumerate(("0:setup", "0:sanity", "11:batch_start", "16:val", "16:ckpt_write", "32:test")):
            for k, who in enumerate(WHO):
                name = ("TERM", "INT", "USR1")[(n + k + again) % 3]
                if (point, who) == ("16:ckpt_write", "rank 1"):  # rank 0 alone writes, and so knows when
                    yield f"0:{point}:RANK1_{name}", 0, 2, again
                else:
                    yield f"{int(who == 'rank 1')}:{point}:{'GROUP_' if who == 'group' else ''}{name}", 0, 2, again
    for point in ("0:setup", "11:batch_start", "16:val"):
        yield from ((f"{rank}:{point}:KILL", 0, 2, 0) for rank in (0, 1))
    yield "0:8:ckpt_write:KILL", 0, 2, 0
    for again in range(CASES):
        yield "0:11:forward:SLOW_INT", 0, 1, again
        yield "1:0:setup:TERM", 0, 2, 3 + again


@pytest.mark.parametrize(
    ("fault", "workers", "ranks", "again"),
    [("0:16:val:GROUP_TERM", 2, 1, 3), *(pytest.param(*case, marks=pytest.mark.full) for case in signals())],
)
def test_row_08_to_10_a_signal_or_a_kill_at_a_point_of_a_run(tmp_path, wholes, fault, workers, ranks, again):
    flags, name = setting(workers, ranks), fault.split(":")[-1].split("_")[-1]
    code = (137 if fault[0] == "0" else 1) if name == "KILL" else CODES[getattr(signal, f"SIG{name}")]
    process = begin(tmp_path, *flags, fault=fault)
    assert ended_after_fault(process, tmp_path) == code, harness.log(tmp_path)
    nothing_is_left(tmp_path, 30.0 if ranks == 2 else 5.0)
    if name != "KILL":
        is_whole(tmp_path, code)
    go_on(tmp_path, wholes(flags)[0], flags)


@pytest.mark.full
@pytest.mark.parametrize(
    ("who", "seconds"), [*((who, seconds) for who in WHO for seconds in (0.5, 2.0, 4.0)), ("group", 6.0)]
)
@pytest.mark.parametrize("number", CODES)
def test_row_09_a_signal_in_start_up(tmp_path, number, seconds, who):
    """Two ranks, of which the second is a new program; seconds count from when the signalled one is there."""
    process = begin(tmp_path, *setting(workers=0, ranks=2), fault=SLOW)
    if who == "rank 1":
        wait_for("no second rank", lambda: bool(second_ranks(process.pid)))
        (second,) = second_ranks(process.pid)
    process.join(seconds)
    signalled = time.monotonic()
    if who == "group":
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid if who == "rank 0" else second, number)
    assert ended(process, LIMIT) == CODES[number], harness.log(tmp_path)
    print(f"ended {time.monotonic() - signalled:.1f} s after the signal")
    nothing_is_left(tmp_path)
    is_whole(tmp_path, CODES[number])


RANDOM = (
    '--data.mixing=[{"class_path": "MixUp"}, {"class_path": "CutMix"}]',
    *("--data.num_workers=2", "--model.patch_dropout=0.3", "--model.feed_forward.dropout=0.1", "--ema.decay=0.9"),
    *("--trainer.accumulate_grad_batches=2", "--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=81"),
)
"""Two ranks with everything random on."""


@pytest.mark.full
def test_row_02_ten_kills_of_two_ranks(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert ended(begin(whole, *RANDOM), 120) == 0, harness.log(whole)
    draw = random.Random(0)
    for number, step in enumerate(sorted(draw.sample(range(1, 32), 10))):
        rank = number % 2
        fault = f"{rank}:{step}:{draw.choice(('batch_start', 'forward', 'after_backward', 'after_opt_step'))}:KILL"
        again = ("fit", "--resume=run") if number else RANDOM
        assert ended(begin(killed, *again, fault=fault), 120) in (137, rank), fault
        nothing_is_left(killed)
    assert ended(begin(killed, "fit", "--resume=run"), 120) == 0, harness.log(killed)
    assert not harness.differences(harness.outcome(whole), harness.outcome(killed))
    assert harness.batches(whole, 1) == harness.batches(killed, 1)


HANGS = {
    "a callback": ("0:12:after_opt_step:HANG", 0, 1),
    "a callback in the first batch": ("0:0:forward:HANG", 0, 1),
    "a callback of the first rank": ("0:12:after_opt_step:HANG", 0, 2),
    "a callback of the second rank": ("1:12:after_opt_step:HANG", 0, 2),
    "what holds Python's lock": ("0:12:after_opt_step:LOCK", 0, 1),
    "what holds the lock of the second rank": ("1:12:after_opt_step:LOCK", 0, 2),
    "a worker": (SLOW, 2, 1),
    "a worker of the first rank": (SLOW, 2, 2),
}
"""What hangs: the fault, workers, ranks. Where one rank hangs, the other one waits for it in a collective."""
QUICK_ENDS = [("a callback", None), ("a worker", None), ("a callback of the second rank", signal.SIGTERM)]


def hangs(folder: Path, what: str, *more: str) -> tuple[BaseProcess, tuple[str, ...]]:
    """Begins a run in which something hangs; returns its process and flags once it does."""
    fault, workers, ranks = HANGS[what]
    flags = setting(workers, ranks)
    process = begin(folder, *flags, *more, fault=fault)
    rank, batches = (int(fault[0]), int(fault.split(":")[1]) + 1) if workers == 0 else (0, 9)
    wait_for("it does not train", trains(folder, rank, batches))
    if workers:
        names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in harness.children(process.pid)}
        os.kill(max(pid for pid, name in names.items() if name == "pt_data_worker\n"), signal.SIGSTOP)  # of training
        time.sleep(1.0)  # it has read ahead
    return process, flags


@pytest.mark.parametrize(
    ("what", "number"),
    [
        pytest.param(what, number, marks=[] if (what, number) in QUICK_ENDS else pytest.mark.full)
        for what in HANGS
        for number in (None, *CODES)
        if number is None or "lock" not in what  # in which no thread of Python runs
    ],
)
def test_row_11_12_what_hangs_ends_by_itself_or_at_a_second_signal(tmp_path, wholes, what, number):
    process, flags = hangs(tmp_path, what, *((WATCHED,) if number is None else ()))
    since = time.monotonic()
    if number is not None:
        os.killpg(process.pid, number)
        time.sleep(1.2)
        assert process.exitcode is None
        os.killpg(process.pid, number)
    code = ended(process, 60)
    print(f"{what}: ended after {time.monotonic() - since:.1f} s")
    assert code == (1 if number is None else CODES[number]), harness.log(tmp_path)
    limit = 0.0 if number is not None else 3.0 * SECONDS if "first batch" in what else SECONDS
    assert time.monotonic() - since < limit + 9.0
    nothing_is_left(tmp_path)
    stacks = {path.name: path.read_text() for path in (tmp_path / "run").glob("hang-*")}
    assert any(stacks.values()) == (number is None)
    if number is None:
        assert "most recent call first" in stacks["hang-rank0.txt"]
        assert "worker" in what or "in do" in stacks[f"hang-rank{HANGS[what][0][0]}.txt"]
    go_on(tmp_path, wholes(flags)[0], flags)
