"""
Train a local model with LoRA on a local file: without padding, with padding, and packed:

    accelerate launch scripts/sft.py --config configs/sft_cpu.yaml --dataset_name rows.jsonl --model_name_or_path MODEL
    accelerate launch scripts/sft.py --config configs/sft_cpu.yaml ... --batch_method padding
    accelerate launch scripts/sft.py --config configs/sft_cpu.yaml ... --batch_method packing

Train an 8B model on one 80 GB GPU:

    accelerate launch scripts/sft.py --config configs/sft_llama3_8b_lora.yaml

Train a 7B vision-language model on one 80 GB GPU:

    accelerate launch scripts/sft.py --config configs/sft_qwen2.5_vl_7b_lora.yaml
"""

from trl_paddingfree.cli.train import main

if __name__ == "__main__":
    main("sft")
