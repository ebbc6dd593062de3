"""
KTO, on a local file and a local model folder:

    accelerate launch scripts/kto.py --dataset_name unpaired.jsonl --model_name_or_path MODEL

The same with TRL's padding, to compare:

    accelerate launch scripts/kto.py --padding_free false ...
"""

from trl_paddingfree.cli.train import main

if __name__ == "__main__":
    main("kto")
