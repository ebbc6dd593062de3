"""
Train a local model with LoRA on a local file:

    accelerate launch scripts/dpo.py --config configs/dpo_cpu.yaml --dataset_name pairs.jsonl --model_name_or_path MODEL

Train with TRL's padding, to compare:

    accelerate launch scripts/dpo.py --config configs/dpo_cpu.yaml ... --padding_free false

Train an 8B model on one 80 GB GPU:

    accelerate launch scripts/dpo.py --config configs/dpo_llama3_8b_lora.yaml
"""

from trl_paddingfree.cli.train import main

if __name__ == "__main__":
    main("dpo")
