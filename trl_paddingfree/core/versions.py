"""The names in TRL's and transformers' trainers that ours need, and the error that says which one a release has moved.

This module imports nothing that may be missing: if other imports fail, it must still say why.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from traceback import walk_tb
from typing import Any

# The lowest and newest versions that the tests run with, as in pyproject.toml, which is not in the wheel
TESTED = {
    "torch": ("2.11.0", "2.15.0"),
    "transformers": ("5.17.0", "5.24.0"),
    "trl": ("1.16.0", "1.16.0"),
    "peft": ("0.20.0", "0.21.2"),
    "accelerate": ("1.10.1", "1.15.0"),
    "datasets": ("4.7.0", "5.2.0"),
}

# Names in TRL's classes that ours override, call or read. An override of a method that is gone would never be called
_GENERATES = "_name _generate_and_score_completions _generate_single_turn _prepare_inputs _tokenize_prompts"
CLASS_NAMES = {
    "Trainer": "_get_num_items_in_batch _get_train_sampler _issue_warnings_after_load _load_best_model "
    "_load_callback_state _load_from_checkpoint _load_rng_state _prepare_inputs _save_checkpoint _save_rng_state "
    "_set_signature_columns_if_needed compute_loss create_accelerator_and_postprocess create_model_card "
    "floating_point_ops get_eval_dataloader get_test_dataloader get_tp_size get_train_dataloader log prediction_step "
    "train training_step",
    "DPOTrainer": "_name _precompute_ref_logps _prepare_dataset compute_ref_log_probs",
    "KTOTrainer": "_name _compute_kl_logps _precompute_ref_logps _prepare_dataset compute_ref_log_probs",
    "SFTTrainer": "_name _prepare_dataset",
    "RewardTrainer": "_name _prepare_dataset",
    "GRPOTrainer": f"{_GENERATES} _calculate_rewards _get_per_token_logps_and_entropies",
    "RLOOTrainer": f"{_GENERATES} _calculate_rewards _get_per_token_logps_and_entropies",
    "DistillationTrainer": f"{_GENERATES} _compute_loss _get_last_hidden_state",
}
# Attributes that the `__init__` of each class sets
_COUNTS = "_metrics _total_train_tokens"
INSTANCE_NAMES = {
    "Trainer": "_signature_columns _train_batch_size",
    "DPOTrainer": f"{_COUNTS} _is_vision_dataset _tokenizer",
    "KTOTrainer": f"{_COUNTS} _is_vision_dataset _tokenizer",
    "SFTTrainer": f"{_COUNTS} _is_vision_dataset _tokenizer",
    "RewardTrainer": _COUNTS,
    "GRPOTrainer": f"{_COUNTS} _buffered_inputs _entropy_window_stats _last_world_entropy _step",
    "RLOOTrainer": f"{_COUNTS} _buffered_inputs _step",
    "DistillationTrainer": f"{_COUNTS} _buffered_inputs _forward_redirection _step",
}


class MovedNameError(ImportError):
    """
    A name that this package takes from another is not where the tested versions have it: `place`, in `package`, has no
    `name`, which `user` needs.
    """

    def __init__(self, package: str, place: str, name: str, user: str):
        packages = dict.fromkeys([package, *untested()])
        super().__init__(
            f"`{place}` has no `{name}`, which `{user}` needs. {installed(packages)} Install tested versions, or "
            "a newer trl-paddingfree."
        )


def installed(packages: Iterable[str]) -> str:
    """A sentence with the installed and the tested versions of packages."""
    tested = {name: " to ".join(dict.fromkeys(TESTED[name])) for name in packages}  # both may be the same
    return f"Installed: {', '.join(f'{name} {_version(name)} (tested: {those})' for name, those in tested.items())}."


def untested() -> list[str]:
    """The packages whose installed version is unknown, or older or newer than those tested."""
    from packaging.version import InvalidVersion, Version

    found = []
    for package, (lowest, newest) in TESTED.items():
        try:
            is_tested = Version(lowest) <= Version(Version(_version(package)).public) <= Version(newest)
        except InvalidVersion:
            is_tested = False
        found += [] if is_tested else [package]
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # imported from a folder
        return "of unknown version"


@contextmanager
def naming_versions() -> Iterator[None]:
    """
    Within this context, or in a function that it decorates, a failed import in this package of a name that a tested
    package should have raises a [`MovedNameError`], and one of such a package an `ImportError` that says what to
    install. Other errors get a note with the installed versions that are untested, except this package's own
    `ValueError`s, which reject something whatever the versions.
    """
    try:
        yield
    except Exception as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        module = frame.f_globals.get("__name__", "")
        is_ours = module.partition(".")[0] == __name__.partition(".")[0]
        if is_ours and (found := _missing_package(error, module) or _moved_import(error, module)):
            raise found from error
        is_named = isinstance(error, MovedNameError) or is_ours and type(error) is ValueError
        packages = [] if is_named else untested()
        note = f"This may be a matter of versions. {installed(packages)}"
        if packages and note not in vars(error).get("__notes__", ()):
            error.add_note(note)
        raise


def _missing_package(error: Exception, module: str) -> ImportError | None:
    """The error for an import in one of our modules that failed because a tested package is not installed."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    package, missing = (error.name or "").partition(".")[0], [name for name in TESTED if find_spec(name) is None]
    if package not in missing:
        return None
    floors = " ".join(f'"{name}>={TESTED[name][0]}"' for name in missing)
    return ImportError(
        f"`{module}` needs {package}, which is not installed. Run `pip install {floors}`; `padding_free` and "
        "`check_packed` need torch and transformers alone."
    )


def _moved_import(error: Exception, module: str) -> MovedNameError | None:
    """The error for a failed import in one of our modules, if a tested package should have the name."""
    if not isinstance(error, ImportError):
        return None
    place = error.name or ""
    if found := re.match(r"cannot import name '(\w+)' from '", str(error)):
        name = found[1]
    else:
        place, _, name = place.rpartition(".")
    package = place.partition(".")[0]
    return MovedNameError(package, place, name, module) if package in TESTED else None


def refuse_moved_names(trainer_class: Any, trainer: Any = None) -> None:
    """
    Refuse a trainer class if the TRL trainer that it extends lacks names in `CLASS_NAMES` or, given a `trainer` that
    TRL's `__init__` has set up, attributes in `INSTANCE_NAMES`.
    """
    trl_trainer, names = trainer_class.trl_trainer, CLASS_NAMES if trainer is None else INSTANCE_NAMES
    found = {*dir(trl_trainer), *({} if trainer is None else vars(trainer))}
    for base in trl_trainer.__mro__:
        package = base.__module__.partition(".")[0]
        for name in names.get(base.__name__, "").split() if package in TESTED else ():
            if name not in found:
                raise MovedNameError(package, base.__name__, name, trainer_class.__name__)


def with_head(forward: Callable) -> Callable | None:
    """The outermost of `forward` and those that it wraps that has TRL's fused LM head; `None` if none has it."""

    def has_head(function: Callable) -> bool:
        return "fused_lm_head" in inspect.signature(function, follow_wrapped=False).parameters

    function = inspect.unwrap(forward, stop=has_head)
    return function if has_head(function) else None


def refuse_moved_head(forward: Callable) -> None:
    """Refuse TRL's fused LM head if it does not take `shift_labels`: flat batches shift labels within each row."""
    head = with_head(forward)
    if head is not None and "shift_labels" not in inspect.signature(head, follow_wrapped=False).parameters:
        raise MovedNameError("trl", "trl.trainer.utils.add_fused_lm_head", "shift_labels", "FlatModel")
