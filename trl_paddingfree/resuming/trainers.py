"""What resuming adds to the trainers, with padding too: they go on from complete checkpoints only, weights by name."""

from ..core.trainers.base import FlatTrainer
from ..core.versions import naming_versions
from .checkpoints import checkpoint_to_resume, found_together, invalidate, naming_weights


class Resuming(FlatTrainer):
    """Around what transformers saves and loads."""

    @naming_versions()
    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        engine = "deepspeed" if self.is_deepspeed_enabled else "fsdp" if self.is_fsdp_enabled else "no"
        given = self.args.output_dir, self.args.save_only_model, engine
        found = found_together(lambda: checkpoint_to_resume(resume_from_checkpoint, *given))
        return super().train(found, *args, **kwargs)

    def _save_checkpoint(self, *args, **kwargs):
        if self.args.should_save:  # an older checkpoint is incomplete while it is overwritten
            invalidate(self.args.output_dir, self.state.global_step)
        super()._save_checkpoint(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # in every process, with what other capabilities save
        # The trainer state, written next, marks a checkpoint as complete: all processes must have written their files
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with naming_weights(self, resume_from_checkpoint, self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with naming_weights(self, self.state.best_model_checkpoint, self.model):
            super()._load_best_model()


Collated = Resuming
Online = Resuming
