"""The training scripts: TRL's own parser and options, with the trainers of this package."""
