"""Settings chosen as in the paper's Appendix B: on a validation split, averaged over seeds.

OUTPUT/study.db      every trial (or wherever `storage` says)
OUTPUT/trials.csv    the same to read
OUTPUT/recipe.yaml   the best settings so far, for `cclis train --config`
OUTPUT/runs/         the run directories of the trials, by the point that they try

Workers that share the output folder share the work. One at a time takes a point. A worker that
finds another one dead resumes its point from the checkpoints that it left.
"""

from __future__ import annotations

import logging
import math
import shutil
import statistics
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import optuna
import yaml
from filelock import FileLock, Timeout
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from cclis.errors import InputError
from cclis.experiment.interruption import Interrupted, Interruption
from cclis.experiment.loop import resuming, training
from cclis.experiment.stages import benchmark_of
from cclis.files import write_atomically
from cclis.methods import make_config, recorded
from cclis.progress import QUIET, Progress
from cclis.runs import Run
from cclis.runs.records import Evaluation
from cclis.settings import Config, TuneOptions, merge, names_of, not_learned, refuse_differences
from cclis.tune.space import Space, points, space_of, suggest
from cclis.tune.trials import Trial, as_csv, count_ended, digest, in_words, is_interrupted, ranked

TPE_TRIALS = 50
TRIALS_BEFORE_PRUNING = 5


def tune(
    config: Config,
    options: TuneOptions,
    *,
    recipe: Mapping[str, Any] | None = None,
    fixed: Collection[str] = (),
    progress: Progress = QUIET,
) -> list[Trial]:
    """Try settings, and write the best as a recipe; called again, it resumes.

    Args:
        config: All other settings, the validation share and the output folder included.
        options: What to try, and how often.
        recipe: The settings that the chosen ones are added to, with the epochs to train for.
        fixed: Settings to leave out of the grid that belongs to the method.
        progress: Where to show progress.

    Returns:
        Every trial of the study, the best first.
    """
    if config.validation is None:
        raise InputError("validation must be given: tuning never looks at the test split")
    if config.output is None:
        raise InputError("output must be given: the folder of the tuning")
    space = space_of(config, options, fixed)
    benchmark_of(config, progress)  # bad data are refused before anything is tried
    folder = Path(config.output)
    if folder.exists() and not (folder / "workers").is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder} holds something else; choose another --output")
    try:
        (folder / "workers").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror}") from None
    with _optuna_says(progress), _storage_errors():
        return _Tuning(config, options, space, folder, recipe or {}, progress).work()


class _Tuning:
    """A worker on a study."""

    def __init__(
        self,
        config: Config,
        options: TuneOptions,
        space: Space,
        folder: Path,
        recipe: Mapping[str, Any],
        progress: Progress,
    ):
        self._config, self._options, self._space = config, options, space
        self._folder, self._recipe, self._progress = folder, recipe, progress
        self._worker = uuid.uuid4().hex
        with self._alone():
            self._study = self._open()

    def work(self) -> list[Trial]:
        """Try points until none is left."""
        limit = self._limit()
        life = self._folder / "workers" / self._worker
        with (
            FileLock(life),
            self._progress.bar("tuning", limit, done=count_ended(ranked(self._study))) as bar,
            Interruption() as stop,
        ):
            stop.waits = True
            try:
                while (trial := self._next(limit)) is not None:
                    self._try(trial, stop)
                    bar.reach(count_ended(self._write()), "tuning")
                    stop.check()
            except Interrupted as signal:
                name = str(signal).split(";", maxsplit=1)[0]
                life.unlink(missing_ok=True)
                raise Interrupted(f"{name}; the same command resumes it") from None
        life.unlink(missing_ok=True)
        trials = self._write()
        if elsewhere := sum(trial.state == "running" for trial in trials):
            self._progress.say(
                f"{elsewhere} of the trials are still running elsewhere; only workers with the "
                "same --output notice when another dies"
            )
        if not any(trial.state == "complete" for trial in trials):
            why = next((f": {trial.error}" for trial in trials if trial.error), "")
            raise InputError(f"none of {len(trials)} trials came to its end{why}")
        return trials

    def _open(self) -> optuna.Study:
        url = self._options.storage or f"sqlite:///{(self._folder / 'study.db').resolve()}"
        waiting = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
        study = optuna.create_study(
            study_name=self._folder.resolve().name,
            storage=optuna.storages.RDBStorage(url, engine_kwargs=waiting),
            direction="maximize",
            load_if_exists=True,
        )
        places = names_of(type(self._config), kind="place")
        now = {k: v for k, v in self._config.to_dict().items() if k not in places}
        now |= {"seeds": self._options.seeds, "grid": self._space}
        before = study.user_attrs.get("settings", now)
        why = f"choose another --output: {self._folder} holds a tuning with"
        refuse_differences(before, now, why, not_learned(type(self._config)))
        study.set_user_attr("settings", before)
        return study

    def _limit(self) -> int:
        if self._options.trials is not None:
            return self._options.trials
        return math.prod(map(len, self._space.values())) if self._grid else TPE_TRIALS

    @property
    def _grid(self) -> bool:
        return self._options.sampler == "grid"

    def _next(self, limit: int) -> optuna.Trial | None:
        """The next point to try, taken before any other worker can; None where all are taken."""
        study, space = self._study, self._space
        with self._alone():
            self._give_up_the_dead()
            trials = study.get_trials(deepcopy=False)
            waiting = [t for t in trials if t.state == TrialState.WAITING]  # left by one who died
            taken = [t.params for t in trials if t not in waiting and not is_interrupted(t)]
            if len(taken) >= limit:
                return None
            again = (
                t.params for t in trials if is_interrupted(t) and t.params.keys() == space.keys()
            )
            left: Iterable[Space] = points(space) if self._grid else again
            point = next((point for point in left if point not in taken), None)
            if point is not None and not waiting:
                study.enqueue_trial(point, user_attrs={"worker": self._worker})
            elif self._grid and not waiting:
                return None
            # A sampler of its own for each trial: what it suggests depends on the study alone.
            study.sampler = optuna.samplers.TPESampler(seed=self._config.seed + len(trials))
            trial = study.ask()
            trial.set_user_attr("worker", self._worker)
            for name, values in space.items():
                suggest(trial, name, values)
            return trial

    def _give_up_the_dead(self) -> None:
        """Fail what is running by the study's account, but whose worker's lock is free."""
        for trial in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            life = self._folder / "workers" / trial.user_attrs.get("worker", "nobody")
            if not life.exists():
                continue  # one of another folder
            try:
                with FileLock(life, timeout=0):
                    self._study.tell(trial.number, state=TrialState.FAIL)
            except Timeout:
                continue
            life.unlink(missing_ok=True)

    def _try(self, trial: optuna.Trial, stop: Interruption) -> None:
        study, said = self._study, in_words(trial.params)
        try:
            found = self._accuracies(trial, stop)
        except optuna.TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
            self._progress.say(f"trial {trial.number}  {said}: pruned")
        except InputError as error:
            trial.set_user_attr("error", str(error))
            study.tell(trial, state=TrialState.FAIL)
            self._progress.say(f"trial {trial.number}  {said}: failed, {error}")
        except BaseException:
            study.tell(trial, state=TrialState.FAIL)  # and, without an error, tried again
            raise
        else:
            trial.set_user_attr("accuracies", found)
            study.tell(trial, statistics.fmean(found))
            seeds = f"{len(found)} seed{'s' if len(found) > 1 else ''}"
            self._progress.say(
                f"trial {trial.number}  {said}: {statistics.fmean(found):.2f} % over {seeds}"
            )

    def _accuracies(self, trial: optuna.Trial, stop: Interruption) -> list[float]:
        """The accuracy of a point for every seed."""
        found: list[float] = []
        for seed in range(self._options.seeds):
            stop.check()

            folder = self._folder / "runs" / digest(trial.params) / f"seed{seed}"
            settings = merge(self._config.to_dict(), trial.params, {"output": str(folder)})
            settings |= {"seed": self._config.seed + seed, "map_samples": 0}
            config = make_config(settings.pop("method"), settings)
            within = self._progress.within()
            if (folder / "config.yaml").exists():
                work = resuming(Run.open(folder), config, within)
            else:
                work = training(config, within)
            try:
                with work as (run, records):
                    for record in chain(run.records, records):
                        if isinstance(record, Evaluation):
                            self._prune(trial, record, seed)
            except (optuna.TrialPruned, InputError):
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
                raise
            # Nobody resumes from there, and a grid of them would fill the disk.
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            result = run.result
            found.append(result.class_il[result.main_head].accuracy)
        return found

    def _prune(self, trial: optuna.Trial, evaluation: Evaluation, seed: int) -> None:
        """Stop a trial that lags behind the others after a task."""
        # Steps beyond any number of tasks, so that each seed has its own.
        step = seed * 1000 + evaluation.task
        trial.report(evaluation.accuracy, step)
        if not self._grid and evaluation.task and lags(self._study, evaluation.accuracy, step):
            raise optuna.TrialPruned

    def _write(self) -> list[Trial]:
        with self._alone():
            trials = ranked(self._study)
            write_atomically(self._folder / "trials.csv", as_csv(trials, self._space).encode())
            if trials[0].state == "complete":
                write_atomically(self._folder / "recipe.yaml", self._recipe_of(trials).encode())
        return trials

    def _recipe_of(self, trials: list[Trial]) -> str:
        """What was given as a recipe or as flags, with the chosen settings, as YAML."""
        best, config = trials[0], self._config.to_dict()
        usual = make_config(self._config.method, {}).to_dict()
        tuned = names_of(type(self._config), in_recipe=True)
        base = {k: v for k, v in self._recipe.items() if k in tuned}
        fixed = tuned - {"epochs", "first_epochs"}  # those of the trials are shorter
        given = {k: v for k, v in config.items() if k in fixed and (k in base or v != usual[k])}
        named = {k: config[k] for k in ("benchmark", "method", "memory")}
        done = sum(trial.state == "complete" for trial in trials)
        head = recorded(self._config.method).main_head()
        said = (
            f"# The best of {done} trials on a validation split of {self._config.validation:.0%}: "
            f"{best.accuracy:.2f} % Class-IL by the head {head}, the mean of "
            f"{self._options.seeds} seeds.\n"
        )
        settings = merge(named, base, given, best.settings)
        return said + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)

    def _alone(self) -> FileLock:
        return FileLock(self._folder / ".lock")


def lags(study: optuna.Study, accuracy: float, step: int) -> bool:
    """Whether an accuracy is in the lowest quarter of what trials had that came to that step.

    Pruned ones included: those that come to their end get ever better, and against them alone
    hardly any other would come to its end. Optuna's own rules take the best a trial ever had; with
    more and more tasks to tell apart that is the first, and nothing would ever be pruned.
    """
    ended = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE, TrialState.PRUNED])
    others = [t.intermediate_values[step] for t in ended if step in t.intermediate_values]
    return len(others) >= TRIALS_BEFORE_PRUNING and accuracy < statistics.quantiles(others, n=4)[0]


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, ImportError, optuna.exceptions.OptunaError) as error:
        said = str(error).splitlines()[0]
        raise InputError(f"the study's storage does not work: {said}") from None
    except OSError as error:
        raise InputError(f"cannot continue tuning: {error}") from None


@contextmanager
def _optuna_says(progress: Progress) -> Iterator[None]:
    """Show what Optuna logs where everything else is shown."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            progress.say(record.getMessage())

    optuna.logging.disable_default_handler()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logger, lines = logging.getLogger("optuna"), Lines()
    logger.addHandler(lines)
    try:
        yield
    finally:
        logger.removeHandler(lines)
