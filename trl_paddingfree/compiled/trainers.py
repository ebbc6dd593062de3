"""What compiled layers add to the trainers: `torch_compile`."""

from ..core.model.flat_model import FlatModel
from ..core.trainers.base import FlatTrainer
from ..core.trainers.proving import Models
from .layers import CompilerOptions, compile_layers, compiled, make_eager, taken_from


class Compiling(FlatTrainer):
    """Compiles the decoder layers of the models, and proves that they are exact."""

    _compiler: CompilerOptions | None = None  # `None`: nothing is compiled

    def take_compiler(self) -> None:
        self._compiler = taken_from(self.accelerator)

    def before_flat(self) -> None:
        for model in self.flat_models():  # those that an earlier trainer has compiled are eager again
            make_eager(self.flat_base(model))
        super().before_flat()

    def after_flat(self, models: Models, are_proven: bool) -> None:
        super().after_flat(models, are_proven)
        if (options := self._compiler) is None:
            return
        for model in models:
            if (flat_model := FlatModel.of(self.flat_base(model))) is not None:
                if are_proven:
                    self.runtime.check.prove_again([model], compiled(flat_model, options))
                compile_layers(flat_model, options)


Collated = Compiling
Online = Compiling
