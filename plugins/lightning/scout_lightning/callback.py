"""`ScoutCallback`: SCOUT in a Lightning Trainer."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Optional, Union

import torch

import scout_core
from scout_core.config import ConfigError, ScoutConfig
from scout_core.manager_api import RESTART_EXIT_CODE, SCOUTFaultReport
from scout_core.replay.guard import attempt
from scout_core.trust.certify import JobVerdict, Vote, agree
from scout_core.trust.channel import JobChannel
from scout_core.trust.states import Outcome
from scout_lightning.adapter import LightningAdapter
from scout_lightning.certifier import Certifier
from scout_lightning.configuration import due_between, scout_config
from scout_lightning.frameworks import Callback
from scout_lightning.fsdp1 import FlatShardsAdapter, units
from scout_lightning.randomness import own_state, restore

logger = logging.getLogger("scout")
OnFault = Union[Literal["report", "stop", "restart"], Callable[[list[SCOUTFaultReport]], None]]  # noqa: UP007
_KEY = "scout"


class ScoutCallback(Callback):
    """Finds corrupt, slow and hanging ranks of a fit, and certifies the checkpoints that Lightning writes.

    Args:
        every_n_train_steps: Optimizer steps between checks. Default: that of `config`, else 50.
        dirpath: Folder of the event log and of what is known of checkpoints, of one run after the other. Default:
            `scout` under the trainer's `default_root_dir`.
        config: A `ScoutConfig`, a dict, or the path of a YAML, TOML or JSON file.
        on_fault: After corruption: `report` it only; `stop` the fit on all ranks; leave with exit code 75 to be
            started again (`restart`); or a function that gets the reports, on every rank. Once a fit.
        log_metrics: Log `scout/checks`, `scout/reports` and `scout/skipped_steps` after each check.
        prog_bar: Show them on the progress bar too.
        instrument_dataloaders: Watch `next()` of the training loaders, so that a stuck worker is named.

    Raises `ConfigError` on construction for a configuration that cannot be used.
    """

    def __init__(
        self,
        every_n_train_steps: Optional[int] = None,  # noqa: UP045 - LightningCLI reads these on Python 3.10
        dirpath: Optional[Union[str, Path]] = None,  # noqa: UP007, UP045
        config: Optional[Union[ScoutConfig, dict[str, Any], str, Path]] = None,  # noqa: UP007, UP045
        on_fault: OnFault = "report",
        log_metrics: bool = True,
        prog_bar: bool = False,
        instrument_dataloaders: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(on_fault, str) and on_fault not in ("report", "stop", "restart"):
            raise ConfigError(f"on_fault={on_fault!r}; give 'report', 'stop', 'restart' or a function")
        self._config = scout_config(config, every_n_train_steps)
        self._dirpath = None if dirpath is None else Path(dirpath)
        self.on_fault = on_fault
        self.log_metrics = log_metrics
        self.prog_bar = prog_bar
        self.instrument_dataloaders = instrument_dataloaders
        self.scout: scout_core.Scout | None = None
        self._certifier: Certifier | None = None
        self._channel: JobChannel | None = None
        self._random_channel: JobChannel | None = None
        self._answered = False
        self._phase = contextlib.ExitStack()
        self._counters: list[Any] = []
        self._moved = False
        self._steps = self._seen = self._first_global = self._first = 0
        self._run_id = ""
        self._checks = 0
        self._random: list[int] | None = None
        self._watched: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Every rank; one broadcast. Before anything is loaded."""
        first = next(callback for callback in trainer.callbacks if isinstance(callback, ScoutCallback))
        if first is not self:
            logger.info("SCOUT: this trainer has another ScoutCallback, which does all of it")
            return
        self._close()
        self._steps = self._seen = self._first = self._checks = 0
        self._answered = self._moved = False
        # one callback is one run, also over several fits, until it loads a checkpoint of another
        self._run_id = trainer.strategy.broadcast(self._run_id or uuid.uuid4().hex)
        place = self._dirpath or Path(trainer.default_root_dir) / "scout"
        self._place = Path(trainer.strategy.broadcast(str(place.absolute())))
        self._certifier = Certifier(trainer, self._place, self._run_id)
        self._certifier.is_now = lambda step: step == self._steps and not self._moved

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Numbers, text and a tensor only, so that `weights_only` loading takes it. Every rank, as Lightning asks for.

        One all-gather of every rank's random state, and of whether corruption was found there since the last vote; but
        not while an exception is on its way: other ranks may be gone.
        """
        if self._certifier is None:
            return
        checkpoint[_KEY] = kept = {"steps": self._steps, "run_id": self._run_id}
        tainted = self.scout is not None and self.scout.tainted
        if self._random_channel is not None and not self._certifier.failing:
            rows = self._gather(self._random_channel, [int(tainted), *own_state()])
            if rows is not None:
                kept["random"] = torch.tensor(rows)[:, 1:].clone()
                tainted = tainted or any(row[0] for row in rows)
        if tainted:  # the next vote, which answers it, comes after this save
            self._certifier.judged(Outcome.SDC, self._steps)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """The catalog goes on where the checkpoint left it."""
        kept = checkpoint.get(_KEY)
        # while SCOUT is attached it counts on: tuners load what they saved in the middle of a fit
        if self._certifier is not None and self.scout is None and isinstance(kept, Mapping):
            self._steps = self._seen = self._first = int(kept["steps"])
            self._run_id = str(kept["run_id"])
            self._certifier.goes_on(self._run_id)
            rows = kept.get("random")
            if isinstance(rows, torch.Tensor) and len(rows) == trainer.world_size:
                self._random = rows[trainer.global_rank].tolist()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Every rank; collectives as `scout_core.attach`. Weights are loaded, the model is wrapped."""
        if self._certifier is None or self.scout is not None:
            return
        refusal = _refusal(trainer)
        if refusal is not None:
            logger.warning("SCOUT: %s; this job is not watched", refusal)
            return
        optimizer = trainer.optimizers[0]
        if len(trainer.optimizers) > 1:
            logger.warning("SCOUT: steps of the first optimizer are the boundaries; states of others are not compared")
        settings = ScoutConfig.build(self._config, run_dir=self._config.run_dir or self._place)
        model = trainer.strategy.model
        kind = FlatShardsAdapter if units(model) else LightningAdapter
        adapter = kind(model, optimizer, settings.replay, first_step=self._steps)
        # two: ranks may save while others vote, which ends in a timeout; in one group unequal rows would end a process
        self._channel = JobChannel(settings.trust.agreement_timeout_s, "lightning")
        self._random_channel = JobChannel(settings.trust.agreement_timeout_s, "lightning_random")
        self._counters = [optimizer.register_step_post_hook(self._count)]
        # their steps come after the check of the first one's, or without one: what they change was not looked at
        self._counters += [other.register_step_post_hook(self._move) for other in trainer.optimizers[1:]]
        self.scout = scout = scout_core.attach(model, optimizer, settings, adapter=adapter)
        self._first_global = trainer.global_step
        self._certifier.io = lambda: scout.checkpoint_io("write", name="lightning")
        if self._random is not None:
            restore(self._random)
            self._random = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Local. The iterators of an epoch are there once its first batch is, which therefore is not watched itself."""
        if self.scout is None or not self.instrument_dataloaders:
            return
        running = getattr(trainer.fit_loop._combined_loader, "_iterator", None)  # Lightning 2.0 to 2.6
        if running is None or running is self._watched or not getattr(running, "iterators", None):
            return
        self._watched = running
        running.iterators = [iter(one) for one in self._watched_loaders(running.iterators)]
        running.iterables = self._watched_loaders(running.iterables)  # of which shorter ones begin anew

    def _watched_loaders(self, loaders: list[Any]) -> list[Any]:
        """Each with a name of its own where there are several."""
        assert self.scout is not None
        names = [f"train[{i}]" if len(loaders) > 1 else "train" for i in range(len(loaders))]
        return [self.scout.instrument_dataloader(one, name=name) for one, name in zip(loaders, names, strict=True)]

    def _count(self, *_: Any) -> None:
        self._steps += 1
        self._moved = False

    def _move(self, *_: Any) -> None:
        self._moved = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Every rank; one all-gather of a row of numbers, after steps that check."""
        scout, before = self.scout, self._seen
        if scout is None or self._steps == before:
            return
        self._seen = self._steps
        due = due_between(before, self._steps, self._config.replay)
        if due is None:
            return
        verdict = self._vote(due)
        if verdict is None:
            return
        assert self._certifier is not None
        self._certifier.judged(verdict.outcome, due)
        self._checks += 1
        if self.log_metrics:
            self._log(trainer, pl_module)
        if verdict.outcome is Outcome.SDC:
            self._answer(trainer)

    def _gather(self, channel: JobChannel, row: list[int]) -> list[list[int]] | None:
        """Every rank's row; None when that failed, after which nothing is gathered any more. One all-gather."""
        rows = attempt("gathering over all ranks", lambda: channel.gather(row)).value
        if rows is None:
            self._channel = self._random_channel = None
        return rows

    def _vote(self, due: int) -> JobVerdict | None:
        """What checks after step `due` came to over all ranks; a rank whose checks stopped has nothing to say.

        Corruption that was found before counts, whichever check or hardware told of it.
        """
        assert self.scout is not None
        if self._channel is None:
            return None
        own = self.scout.outcome_at(due)
        outcome = Outcome.SDC if self.scout.tainted else own or Outcome.INCONCLUSIVE
        rows = self._gather(self._channel, Vote(step=due, outcome=outcome, broken=own is None).encode())
        return None if rows is None else agree([Vote.decode(row) for row in rows])

    def _answer(self, trainer: Any) -> None:
        """After corruption, once a fit, on every rank alike. Raises `SystemExit` under `restart`."""
        assert self._certifier is not None and self.scout is not None
        if self._answered:
            return
        self._answered = True
        if callable(self.on_fault):
            self.on_fault(list(self.scout.reports))
        elif self.on_fault == "stop":
            trainer.should_stop = True
        elif self.on_fault == "restart":
            self._certifier.failing = True
            self.scout.close()
            raise SystemExit(RESTART_EXIT_CODE)

    def _log(self, trainer: Any, pl_module: Any) -> None:
        assert self.scout is not None
        skipped = trainer.global_step - self._first_global - (self._steps - self._first)
        values = {"scout/checks": float(self._checks), "scout/reports": float(len(self.scout.reports))}
        if len(trainer.optimizers) == 1:
            values["scout/skipped_steps"] = float(skipped)
        pl_module.log_dict(values, prog_bar=self.prog_bar, on_step=True, on_epoch=False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validation has a patience of its own."""
        if self.scout is not None:
            self._phase.enter_context(self.scout.phase("eval"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._phase.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Local: other ranks may be anywhere. What is saved from now on is not certified."""
        if self._certifier is not None:
            self._certifier.failing = True
        self._end_watch()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Local. Not called after an exception, after which the next `setup` takes the rest off."""
        self._close()

    def _end_watch(self) -> None:
        self._phase.close()
        while self._counters:
            self._counters.pop().remove()
        if self.scout is not None:
            self.scout.close()

    def _close(self) -> None:
        self._end_watch()
        if self._certifier is not None:
            self._certifier.close()
            self._certifier = None
        self.scout = self._channel = self._random_channel = self._watched = self._random = None


def _refusal(trainer: Any) -> str | None:
    """Why this trainer's fit cannot be watched, with what to do instead."""
    if not trainer.optimizers:
        return "configure_optimizers gave no optimizer, whose steps are the boundaries; return the one you step"
    if "DeepSpeedStrategy" not in {kind.__name__ for kind in type(trainer.strategy).__mro__}:
        return None
    if find_spec("scout_deepspeed") is None:
        return "the deepspeed strategy needs scout_deepspeed, which is not installed"
    return "the deepspeed strategy is watched by scout_deepspeed, through DeepSpeed's own configuration"
