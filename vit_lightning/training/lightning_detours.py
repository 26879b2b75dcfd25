"""All that replaces methods of Lightning or sets and reads its private names, a function for each.

Each that mends a behaviour names it and, behind "Proof", the test in
``tests/faults/test_plain_lightning.py`` that fails as long as Lightning behaves so: a test that passes after an upgrade
tells that its function can go.
"""

import contextlib
import datetime
import functools
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics import Metric

from vit_lightning.errors import reading
from vit_lightning.models.positions import ExactTable
from vit_lightning.signals import is_ended_by_signals, withheld

_NOTHING = contextlib.nullcontext()


def take_detours(trainer: Trainer, change: Callable[[Any], Any]) -> None:
    """Takes all detours of a Trainer that any of our commands needs; ``change`` changes its loaders."""
    end_each_epoch_once(trainer)
    restore_in_words(trainer)
    leave_signals_to_us(trainer)
    log_over_ranks(trainer)
    start_ranks_without_signals(trainer)
    change_loaders(trainer, change)
    profile_nothing(trainer)


def end_each_epoch_once(trainer: Trainer) -> None:
    """Lets a run with ``max_steps`` resume behind the end of an epoch: Lightning ends that epoch once more.

    Proof: test_the_steps_of_a_log_are_right_after_the_end_of_an_epoch.
    """
    trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]


def begin_epoch_again(trainer: Trainer, call_hooks: Callable[[], object], put_back: Callable[[], object]) -> None:
    """Calls hooks of an epoch's start where a run resumes inside it, which Lightning does not, then ``put_back``.

    Where it resumes at the end of an epoch, ``put_back`` comes before Lightning calls the hooks of the next one, what
    was logged in that epoch is forgotten, and the loader begins behind these hooks, as in other epochs. A schedule that
    follows a metric has its step, which comes after a checkpoint, and also at the end of the first epoch.

    Proof: test_an_epoch_s_start_is_told_to_a_run_that_resumes_inside_it, and
    test_a_rate_that_follows_a_metric_does_so_after_a_restart.
    """
    loop = trainer.fit_loop
    start = loop.on_advance_start

    def call() -> None:
        loop.on_advance_start = start  # type: ignore[method-assign]
        is_inside = loop.restarted_mid_epoch or loop.restarted_on_epoch_end
        loop.epoch_loop.val_loop.setup_data()  # ModelCheckpoint asks it whether a validation follows
        if not is_inside:
            put_back()
            loop.epoch_progress.current.completed -= 1
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            loop.epoch_progress.current.completed += 1
            trainer._logger_connector.reset_results()
        start()
        if is_inside:
            call_hooks()
            put_back()
            loop._restarting = False
            if not loop.epoch_loop.val_loop.restarted_mid_evaluation:
                loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        elif loop._data_fetcher is not None:
            iter(loop._data_fetcher)

    loop.on_advance_start = call  # type: ignore[method-assign]


def own_generators(trainer: Trainer) -> list[torch.Generator]:
    """Returns the generators from which loaders of the user's draw the order of training."""
    loader = trainer.fit_loop._combined_loader
    loaders = [] if loader is None else loader.flattened
    samplers = (getattr(one, name, None) for one in loaders for name in ("sampler", "batch_sampler"))
    found = (getattr(one, "generator", None) for one in (*loaders, *samplers))
    return [one for one in found if isinstance(one, torch.Generator)]


def call_after_training(trainer: Trainer, function: Callable[[], object]) -> None:
    """Calls a function after all hooks of the end of training: those of the module come after those of callbacks."""
    _call_behind(trainer.fit_loop, "on_run_end", function)


def call_after_batches(trainer: Trainer, function: Callable[[], object]) -> None:
    """Calls a function after all hooks of the end of each batch of training, also that of the module.

    Proof: test_what_a_module_does_at_the_end_of_a_batch_is_in_the_checkpoint.
    """
    _call_behind(trainer._logger_connector, "on_batch_end", lambda: trainer.training and function())


def _call_behind(place: object, name: str, function: Callable[[], object]) -> None:
    end = getattr(place, name)

    def call() -> None:
        end()
        function()

    setattr(place, name, call)


def restore_in_words(trainer: Trainer) -> None:
    """Lets a checkpoint that does not fit end in words: Lightning looks for keys in it that may not be there.

    Proof: test_a_checkpoint_with_other_contents_is_named.
    """
    connector = trainer._checkpoint_connector
    for name in ("_restore_modules_and_callbacks", "restore_training_state"):
        setattr(connector, name, reading("the checkpoint of the run")(getattr(connector, name)))


def profile_nothing(trainer: Trainer) -> None:
    """Makes the profiler that does nothing free: Lightning enters a new context of it a hundred times in a step.

    Proof: test_no_profiler_is_called_where_none_is_asked_for.
    """
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    if type(profiler) is PassThroughProfiler:
        vars(profiler)["profile"] = lambda name: _NOTHING


def leave_signals_to_us(trainer: Trainer) -> None:
    """Keeps Lightning from handling SIGTERM: it exits with 0, and asks the first rank in each step, which may hang.

    The answer comes by way of the device, so that each step waits for it.

    Proof: test_a_run_that_is_terminated_does_not_look_finished (issue 19916), and
    test_no_step_of_several_ranks_waits_for_another_rank.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def start_ranks_without_signals(trainer: Trainer) -> None:
    """Starts further ranks of a command with signals blocked: one that comes during their imports would end them.

    Lightning then kills the first rank, before its checkpoint. The ranks unblock signals once they have handlers.

    Proof: test_a_further_rank_outlives_a_signal_while_it_imports.
    """
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher) and is_ended_by_signals():
        launcher._call_children_scripts = withheld()(launcher._call_children_scripts)  # type: ignore[method-assign]


def wait_at_most(trainer: Trainer, minutes: float) -> None:
    """Limits the time in which ranks wait for one another, where the user's strategy does not; 0 changes nothing."""
    if minutes and longest_wait(trainer) == datetime.timedelta(minutes=30):  # torch's default
        vars(trainer.strategy)["_timeout"] = datetime.timedelta(minutes=minutes)


def longest_wait(trainer: Trainer) -> datetime.timedelta | None:
    """Returns the time in which ranks wait for one another; None for that of torch."""
    return getattr(trainer.strategy, "_timeout", None)


def log_over_ranks(trainer: Trainer) -> None:
    """Makes numbers of an epoch those of all ranks: logged without ``sync_dist`` they are those of a rank's own images.

    Ranks that have logged other names do not wait for one another.

    Proof: test_a_number_of_an_epoch_is_that_of_all_ranks.
    """
    connector = trainer._logger_connector
    warn = functools.cache(warnings.warn)  # each text once

    def joined(function: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            _join_ranks(trainer, trainer._results)
            for text in () if trainer.training else (*_mixed_metrics(trainer), *_empty_averages(trainer)):
                warn(text)
            return function()

        return call

    for name in ("epoch_end_reached", "on_epoch_end"):  # before hooks of its end, and behind them
        setattr(connector, name, joined(getattr(connector, name)))


def _join_ranks(trainer: Trainer, results: Any) -> None:
    """Gives all numbers of an epoch the value of all ranks, which all call it at once.

    Also those with ``sync_dist``: Lightning takes the mean of the ranks' batch sizes, as a whole number.
    """
    if trainer.world_size == 1 or results is None:
        return
    own = {
        key: (entry.value.cpu(), getattr(entry, "cumulated_batch_size", torch.tensor(1)).cpu())
        for key, entry in results.items()
        if entry.is_tensor and entry.meta.on_epoch and not entry.has_reset
        if not entry.meta.sync.rank_zero_only
    }
    ranks: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(ranks, own)
    for key in own:
        found = [rank[key] for rank in ranks if key in rank and rank[key][1]]  # a rank may have no images
        values, counts = (torch.stack(column) for column in zip(*(found or [own[key]]), strict=True))
        meta = results[key].meta
        value = values.sum() / counts.sum() if meta.is_mean_reduction else getattr(values, meta.reduce_fx.__name__)()
        results[key]._computed = value.to(results[key].value)


def _mixed_metrics(trainer: Trainer) -> Iterator[str]:
    """Yields what is wrong with a Metric that has counted the images of several loaders by the end of one of them.

    Lightning resets it only after the last one: test_a_metric_that_counts_several_loaders_together_is_said.
    """
    found: dict[int, dict[Any, Any]] = {}
    for entry in (trainer._results or {}).values():
        if not (entry.is_tensor or entry.has_reset):
            found.setdefault(id(entry.value), {})[entry.meta.dataloader_idx] = entry
    for entries in found.values():
        *before, (loader, last) = entries.items()
        if before and last.value.update_count > trainer._evaluation_loop.max_batches[loader]:
            text = "one Metric is logged for several loaders and counts their images together"
            yield f"{last.meta.name}: {text} (give each loader a Metric of its own)"


def _empty_averages(trainer: Trainer) -> Iterator[str]:
    """Yields what is wrong with a callback whose average, which is measured, is still the weights before training.

    Proof: test_no_average_is_kept_before_there_is_one.
    """
    for one in trainer.callbacks:  # type: ignore[attr-defined]
        average = one._average_model if isinstance(one, WeightAveraging) and logged_steps(trainer) else None
        if average is not None and not average.n_averaged:
            text = "it has averaged nothing yet, and the untrained weights are measured in its place"
            yield f"trainer.callbacks.{type(one).__name__}: {text} (lower update_starting_at_step, or give ema.decay)"


def send_no_tables(module: LightningModule) -> None:
    """Keeps DDP from sending tables of positions to all ranks before each forward pass: they never change.

    Proof: test_a_buffer_that_never_changes_is_sent_once.
    """
    tables = [f"{name}.table" for name, part in module.named_modules() if isinstance(part, ExactTable)]
    ignored = "_ddp_params_and_buffers_to_ignore"
    vars(module)[ignored] = [*getattr(module, ignored, ()), *tables]


def change_loaders(trainer: Trainer, change: Callable[[Any], Any]) -> None:
    """Passes each DataLoader through ``change``, also those that Lightning makes anew: torch's workers die of signals.

    Proof: test_a_signal_to_the_group_leaves_the_workers_to_the_main_process.
    """
    process = trainer.strategy.process_dataloader
    trainer.strategy.process_dataloader = lambda dataloader: process(change(dataloader))  # type: ignore[method-assign]


def predict_with(module: LightningModule, predict_step: Callable[..., Any]) -> None:
    """Gives a module without a ``predict_step`` one: Lightning's passes (images, labels) to ``forward``.

    Proof: test_labels_are_no_input_of_a_prediction.
    """
    if not is_overridden("predict_step", module):
        module.predict_step = functools.partial(predict_step, module)  # type: ignore[method-assign]


def count_as_trained(trainer: Trainer, *, epochs: int, steps: int) -> None:
    """Sets the counters by which a test is logged: Lightning logs it at step 0 where the process has not trained.

    Proof: test_a_test_is_logged_at_the_step_of_its_checkpoint.
    """
    trainer.fit_loop.epoch_progress.current.completed = epochs
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def end_other_ranks(trainer: Trainer) -> None:
    """Ends the ranks that this process has started: Lightning kills this one too, seconds after one of them has ended.

    A signal may have come to this process alone.
    """
    if isinstance(launcher := trainer.strategy.launcher, _SubprocessScriptLauncher):
        launcher.kill(signal.SIGTERM)
        launcher.procs.clear()


def data_of(trainer: Trainer) -> Any:
    """Returns our data of a Trainer, also where its datamodule is the user's."""
    return getattr(trainer.datamodule, "wrapped_by", trainer.datamodule)  # type: ignore[attr-defined]


def logged_steps(trainer: Trainer) -> int:
    """Returns the optimizer steps by which Lightning numbers rows; ``global_step`` counts those of all optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def trained_steps(trainer: Trainer) -> int:
    """Returns the optimizer steps done by the end of a batch, in rows' numbers: one for all optimizers of a module.

    Also of a module that steps by hand, of which ``global_step`` counts each optimizer, or none without its wrapper.
    """
    is_inside = trainer.fit_loop.restarting or not epoch_ends(trainer)  # the row of the batch is still to come
    return logged_steps(trainer) + (is_inside and not accumulates(trainer))


def accumulates(trainer: Trainer) -> bool:
    """Whether the gradients of this batch are kept for the next one, without a step of the optimizer."""
    return trainer.fit_loop._should_accumulate()


def validates_now(trainer: Trainer) -> bool:
    """Whether validation follows this batch."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def epoch_ends(trainer: Trainer) -> bool:
    """Whether all batches of the epoch have been trained, and validated."""
    return trainer._logger_connector._first_loop_iter is None and not trainer.validating


def stops_early(trainer: Trainer) -> bool:
    """Whether a callback ends training here: Lightning keeps that in no checkpoint, so a resumed run would train on."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def can_validate_again(trainer: Trainer) -> bool:
    """Whether a resumed run begins with the validation that comes now: not if the time or a callback asked for it."""
    return not trainer.should_stop and trainer._val_check_time_interval is None  # type: ignore[attr-defined]


@contextlib.contextmanager
def logged_by(trainer: Trainer, rename: Callable[[str], str]) -> Iterator[None]:
    """Logs metrics by other names for a while: a module logs those of each test by the same ones."""
    connector = trainer._logger_connector
    log = connector.log_metrics
    connector.log_metrics = (  # type: ignore[method-assign]
        lambda metrics, step=None: log({rename(name): value for name, value in metrics.items()}, step)
    )
    yield
    connector.log_metrics = log  # type: ignore[method-assign]


def logged_so_far(trainer: Trainer) -> dict[str, Any]:
    """Returns what Lightning has summed of the training's numbers in this epoch, as plain data.

    Proof: test_a_metric_is_that_of_the_whole_epoch.
    """
    found = {}
    for key, entry in trainer.fit_loop.epoch_loop._results.items():
        if not entry.has_reset:
            meta = {name: value for name, value in vars(entry.meta).items() if name != "_sync"}
            sync = entry.meta.sync.should, entry.meta.sync.rank_zero_only
            found[key] = meta | {"reduce_fx": entry.meta.reduce_fx.__name__}, sync, entry.metric_state
    return found


def log_on(trainer: Trainer, earlier: dict[str, Any]) -> None:
    """Lets the numbers of an epoch go on with what ``logged_so_far`` returned, or those of the module's metrics."""
    metrics = dict(trainer.lightning_module.named_modules())
    for key, (meta, (should, rank_zero_only), state) in earlier.items():
        made = _Metadata(**meta)
        made.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
        entry = trainer.fit_loop.epoch_loop._results[key] = _ResultMetric(made, is_tensor=bool(state))
        vars(entry).update(state or {"value": metrics[str(made.metric_attribute)]})
        for metric in (entry, *([] if state else [entry.value])):
            metric._update_count = max(1, metric._update_count)  # else it warns that it was not updated
    trainer._logger_connector._first_loop_iter = False  # in the first batch Lightning begins each number again


def numbers_for_bar(trainer: Trainer, monitor: str) -> dict[str, float]:
    """Returns what was logged for Lightning's bar in the epoch or the validation that has just ended.

    Lightning itself also keeps the numbers of earlier ones.

    Args:
        trainer: the Trainer.
        monitor: name of a metric that belongs to them in any case.
    """
    results: Any = trainer._results
    steps, epoch = (results.metrics(on_step=on_step) for on_step in (True, False))
    found = steps["pbar"] | epoch["pbar"] | {name: one for name, one in epoch["callback"].items() if name == monitor}
    return {name: float(number) for name, number in found.items() if name.removesuffix("_step") + "_epoch" not in found}


def is_of_epoch(trainer: Trainer, name: str) -> bool:
    """Whether the number that was logged in the epoch that ends is of all its batches; else it is of the last one."""
    results: Any = trainer._results
    return name in results.metrics(on_step=False)["callback"]


def row_to_come(trainer: Trainer) -> dict[str, Any]:
    """Returns the row that Lightning logs only after the checkpoint; a kill in between would lose it."""
    connector = trainer._logger_connector
    trains = trainer.state.fn == TrainerFn.FITTING and not trainer.validating and trained_steps(trainer) > 0
    if not (trains and (epoch_ends(trainer) or connector.should_update_logs)):
        return {}
    numbers = {name: float(number) for name, number in connector.metrics["log"].items()}
    return {"step": trained_steps(trainer) - 1, "epoch": trainer.current_epoch, **numbers} if numbers else {}


def is_attached(module: LightningModule) -> bool:
    """Whether a Trainer runs a module, whose ``trainer`` raises an error where none does."""
    return module._trainer is not None


def log_again(module: LightningModule, name: str, value: Tensor | Metric, *, prog_bar: bool = False) -> None:
    """Logs a metric of the epoch, or a number of the step, as ``module.log`` does.

    That checks and copies so much that it takes as long as a layer of a small network. Here it is called once in each
    epoch, and then its entry gets the new value. Without ``prog_bar`` nothing waits for the device.
    """
    trainer = module._trainer  # none outside of a training
    results: Any = None if trainer is None else trainer._results
    entry = None if results is None else results.get(f"{module._current_fx_name}.{name}")
    if entry is None or entry.has_reset:
        module.log(
            name, value, prog_bar=prog_bar, on_step=isinstance(value, Tensor), on_epoch=isinstance(value, Metric)
        )
    else:
        entry.update(value.detach() if isinstance(value, Tensor) else value, 1)
