"""The plan of a trainer under a `memory_budget`: made once, saved and resumed."""

from typing import Any, ClassVar

from transformers import Trainer

from .memory_budget import MemoryBudget, is_sharded
from .memory_needs import plan_memory
from .refusals import refuse_beside_budget


class PlannedMemory(Trainer):
    """The part of the padding-free trainers that plans for a `memory_budget`; mixed in before their base."""

    flat: Any
    # Attributes in which TRL's loss keeps account
    changed_by_loss: ClassVar[tuple[str, ...]] = ()

    def refuse_small_budget(self, memory: MemoryBudget) -> None:
        """Refuse a budget that an example, of those that are known, does not fit into."""
        raise NotImplementedError

    def images_in_memory(self) -> list[dict[str, Any]]:
        """Arguments of calls with images, of which one differs from another in their number; none for text."""
        return []

    def refuse_arguments(self, arguments: dict[str, Any]) -> None:
        """Refuse arguments of the trainer that cannot be combined with flat batches, or with a budget."""
        base: Any = super()
        base.refuse_arguments(arguments)
        if self.flat.options.memory_budget is not None:
            config = arguments["args"]
            refuse_beside_budget(self.flat.options, config)
            config.gradient_checkpointing = config.activation_checkpointing = True  # the budget decides how far

    def start(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run TRL's `__init__`, make the trainer flat, and plan, unless the weights are yet to be placed."""
        base: Any = super()
        base.start(args, kwargs)
        if self.flat is not None and not self.flat.awaits_weights and not is_sharded(self.accelerator):
            self.plan_memory()

    def plan_memory(self) -> None:
        """Count what layers keep, and refuse a budget that an example does not fit into. Once, if there is a budget."""
        flat = self.flat
        if flat is None or flat.route is None or flat.memory is not None or flat.options.memory_budget is None:
            return
        flat.memory = memory = plan_memory(self, flat.route)
        if flat.resumed_from is not None:
            memory.load(flat.resumed_from, self.args.process_index)
        if not memory.has_shrunk:  # an allocation that failed has made it smaller than the data was measured by
            self.refuse_small_budget(memory)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # which makes the folder, in every process
        if self.flat is not None and self.flat.memory is not None:
            self.flat.memory.save(output_dir, self.args.process_index)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.flat is not None and checkpoint is not None:
            self.flat.resumed_from = checkpoint
            if self.flat.memory is not None:
                self.flat.memory.load(checkpoint, self.args.process_index)
        super()._load_rng_state(checkpoint)
