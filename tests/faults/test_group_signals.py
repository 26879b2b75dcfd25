"""Rows 8 and 9 of the fault plan: signals to the process group, as of a terminal, of ``timeout`` and of a cluster."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import harness
import processes
import pytest
import warm_rank

from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.storage.metrics import read_results

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138}
LAST = "run/checkpoints/last.ckpt"


def in_group(*arguments: str) -> None:
    """Runs the command as the first of a process group, which starts the second rank."""
    os.setsid()
    processes.command(*arguments)


def in_ranks(*arguments: str) -> None:
    """The same, with a second rank that has imported everything."""
    os.setsid()
    warm_rank.prepare(*arguments)
    processes.command(*arguments)


def setting(workers: int, ranks: int) -> tuple[str, ...]:
    flags = ("--checkpoint.every_n_steps=null", f"--data.num_workers={workers}")
    if ranks == 1:
        return flags
    return (*flags, "--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=81")


def begin(folder: Path, *flags: str, fault: str = "", call: Callable[..., None] | None = None) -> BaseProcess:
    arguments = (*flags,) if flags[0] == "fit" else ("fit", *harness.FLAGS, *flags)
    call = call or (in_ranks if "--trainer.devices=2" in flags else in_group)
    return harness.start(folder, *arguments, fault=fault, call=call, PYTHONPATH=os.pathsep.join(sys.path))


def ended(process: BaseProcess, seconds: float) -> int:
    """The exit code as a shell has it."""
    process.join(seconds)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        pytest.fail(f"it has not ended in {seconds} s")
    return 128 - process.exitcode if process.exitcode < 0 else process.exitcode


def is_whole(folder: Path, code: int) -> None:
    """Checks what a signal has left: no process, no partial file, no traceback, a checkpoint of the last step."""
    until = time.monotonic() + 5
    while harness.orphans(folder) and time.monotonic() < until:
        time.sleep(0.02)
    assert not harness.orphans(folder)
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
    call = in_ranks if "--trainer.devices=2" in flags else in_group
    process = begin(folder, *(("fit", "--resume=run", "--watchdog_minutes=30") if resumes else flags), call=call)
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


@pytest.mark.parametrize(
    ("point", "number", "workers", "ranks", "again"),
    [
        ("16:val", signal.SIGTERM, 2, 1, 0),
        *(pytest.param("16:val", signal.SIGTERM, 2, 1, again, marks=pytest.mark.full) for again in (1, 2)),
        *(
            pytest.param(*case, again, marks=pytest.mark.full)
            for case in [
                ("0:setup", signal.SIGTERM, 2, 1),
                ("12:batch_start", signal.SIGTERM, 2, 1),
                ("16:val", signal.SIGINT, 2, 1),
                ("0:setup", signal.SIGINT, 2, 2),
                ("0:sanity", signal.SIGUSR1, 2, 1),
                ("0:sanity", signal.SIGTERM, 2, 2),
                ("12:forward", signal.SIGINT, 2, 2),
                ("16:val", signal.SIGUSR1, 0, 1),
                ("16:val", signal.SIGTERM, 2, 2),
                ("24:epoch_end", signal.SIGINT, 2, 1),
                ("32:train_end", signal.SIGTERM, 2, 2),
                ("32:test", signal.SIGTERM, 2, 1),
                ("32:test", signal.SIGUSR1, 2, 2),
            ]
            for again in range(3 if case[-1] == 1 else 1)  # test_ends.py has more of two ranks
        ),
    ],
)
def test_row_08_a_signal_to_the_group(tmp_path, wholes, point, number, workers, ranks, again):
    flags = setting(workers, ranks)
    process = begin(tmp_path, *flags, fault=f"0:{point}:GROUP_{number.name[3:]}")
    assert ended(process, 120) == CODES[number], harness.log(tmp_path)
    is_whole(tmp_path, CODES[number])
    go_on(tmp_path, wholes(flags)[0], flags)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_row_09_twenty_signals_to_the_group_at_random_moments(tmp_path, wholes, workers, ranks):
    flags = setting(workers, ranks)
    whole, seconds = wholes(flags)
    draw, slowest, count, tried, finished = random.Random(10 * workers + ranks), 0.0, 0, 0, 0
    while count < 20:
        number, folder = list(CODES)[count % 3], tmp_path / str(tried)
        tried += 1
        process = begin(folder, *flags, fault="0:*:batch_start:SLEEP,0:*:val:SLEEP")
        while os.getpgid(process.pid) != process.pid:
            time.sleep(0.001)
        process.join(draw.uniform(0.0, seconds))
        if process.exitcode is not None:  # it had ended before
            continue
        os.killpg(process.pid, number)
        signalled = time.monotonic()
        code = ended(process, 15)
        slowest = max(slowest, time.monotonic() - signalled)
        has_finished = bool(read_results(folder / "run"))  # and was about to end
        assert code == CODES[number] or (code == 0 and has_finished), harness.log(folder)
        finished += has_finished
        is_whole(folder, code)
        go_on(folder, whole, flags)
        count += 1
    last = f"{finished} of them to a finished run"
    print(f"{workers} workers, {ranks} ranks: {count} signals, {last}, the slowest end took {slowest:.1f} s")
