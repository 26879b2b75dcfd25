"""The watchdog of a run, by the seconds that it gives faulthandler."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import DDPStrategy

from vit_lightning.training import endings
from vit_lightning.training.endings import LATER, Watchdog, stacks_of
from vit_lightning.training.lightning_detours import longest_wait, wait_at_most


@pytest.fixture
def armed(monkeypatch):
    """The seconds for which it was armed, one after another; None where it was not any more; and a clock."""
    found = SimpleNamespace(seconds=[], now=100.0)
    give = lambda seconds, **_: found.seconds.append(seconds)  # noqa: E731
    monkeypatch.setattr(endings.faulthandler, "dump_traceback_later", give)
    monkeypatch.setattr(endings.faulthandler, "cancel_dump_traceback_later", lambda: found.seconds.append(None))
    monkeypatch.setattr(endings.time, "monotonic", lambda: found.now)
    return found


def begin(folder, minutes=0.5):
    dog = Watchdog(folder, minutes)
    trainer = SimpleNamespace(global_rank=0, strategy=SimpleNamespace(broadcast=lambda folder: folder))
    dog.setup(trainer, None, "fit")
    return dog


def test_a_first_batch_has_three_times_as_long_and_others_are_timed_once_a_second(armed, tmp_path):
    dog = begin(tmp_path)
    for hook, seconds in [
        (dog.on_validation_start, 0.0),
        (dog.on_validation_batch_end, 5.0),
        (dog.on_train_start, 0.1),
        (dog.on_train_batch_end, 0.1),
        (dog.on_train_batch_end, 0.9),
        (dog.on_train_batch_end, 0.2),
        (dog.on_test_start, 0.0),
        (dog.on_test_batch_end, 2.0),
        (dog.teardown, 0.0),
    ]:
        armed.now += seconds
        hook()
    assert armed.seconds == [90.0, 90.0, 30.0, 90.0, 30.0, 30.0, 90.0, 30.0, None]


def test_the_first_rank_ends_first(armed, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    begin(tmp_path)
    assert armed.seconds == [90.0 + LATER]


@pytest.mark.parametrize("earlier", ["", "stacks of an earlier process"])
def test_stacks_are_kept_and_an_empty_file_is_not(armed, tmp_path, earlier):
    stacks_of(tmp_path).write_text(earlier)
    dog = begin(tmp_path)
    dog.on_exception()
    dog.teardown()
    assert armed.seconds[1:] == [None]
    assert stacks_of(tmp_path).exists() == bool(earlier)


def test_no_minutes_are_no_watchdog(armed, tmp_path):
    dog = begin(tmp_path, 0.0)
    dog.on_train_batch_end()
    dog.teardown()
    assert armed.seconds == []
    assert not [*tmp_path.iterdir()]


def test_ranks_wait_four_times_as_long_for_one_another():
    trainer = SimpleNamespace(strategy=DDPStrategy())
    wait_at_most(trainer, 4 * 30.0)
    assert longest_wait(trainer) == timedelta(hours=2)
    trainer = SimpleNamespace(strategy=DDPStrategy(timeout=timedelta(minutes=5)))
    wait_at_most(trainer, 4 * 30.0)
    assert longest_wait(trainer) == timedelta(minutes=5), "the user's own"
