#!/usr/bin/env bash
# Tests and benchmarks on one GPU, in less than ten minutes:
#
#     scripts/gpu.sh results/
#
# writes the environment, the test report, and for each benchmark NAME.json, NAME.md and NAME.png into the folder.
# Row lengths are read from $TRL_PADDINGFREE_DATA/lengths/*.csv.gz, or made up where that folder is missing.
# The package need not be installed: python3 must find torch, transformers, trl, peft, accelerate and datasets.
set -uo pipefail
out=$(mkdir -p "${1:?name a folder for the results}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore TQDM_DISABLE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export PYTORCH_ALLOC_CONF=expandable_segments:True
lengths=${TRL_PADDINGFREE_DATA:-}/lengths
seconds=${SECONDS_FOR_ALL:-570}
failed=0

# Run a command for at most $1 seconds, and no longer than is left for all
within() {
    local limit=$1 left=$((seconds - SECONDS))
    shift
    ((limit > left)) && limit=$left
    if ((limit < 20)); then
        echo "--- no time left for: $*"
        failed=1
        return
    fi
    echo "--- $SECONDS s, at most $limit s: $*"
    timeout "$limit" "$@" || { echo "--- exit status $?"; failed=1; }
}

# The length file $1, or else the made-up lengths $2
rows() { if [ -f "$lengths/$1.csv.gz" ]; then echo "$lengths/$1.csv.gz"; else echo "$2"; fi; }

bench() { python3 -m trl_paddingfree.benchmark "$@" --output "$out"; }
export -f bench
export out

{
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
    python3 -c '
import json
from trl_paddingfree.benchmark.environment import environment
print(json.dumps(environment("cuda"), indent=1))'
    git log -1 --format="commit %H" 2>/dev/null
} | tee "$out/environment.txt"

within 130 bash -o pipefail -c 'python3 -m pytest -m gpu -q --maxfail=20 -p no:cacheprovider tests 2>&1 | tee "$out/pytest.txt"'

# The claim: 8B, LoRA, gradient checkpointing, batch 8, 1,024 tokens
eight="--model llama-3-8b --tuning lora --batch-size 8 --max-length 1024"
within 180 bash -c "bench dpo $eight --batches 4 --rounds 2 --profile --name dpo --lengths \
    $(rows pref_ultrafeedback_1000 uniform:60-1000) $(rows pref_hh_harmless_1500 uniform:40-400)"
within 120 bash -c "bench sft $eight --batches 6 --rounds 2 --name sft --lengths \
    $(rows sft_p3_t0_flanlike_20000 uniform:20-1000) $(rows sft_gsm8k_train_7473 uniform:80-400)"

# Rows without anything to win, at the sizes for which others report tokens per second of LoRA SFT on one GPU
within 60 bash -c "bench sft --model llama-3-8b --tuning lora --batch-size 2 --max-length 4096 --batches 3 --rounds 2 \
    --lengths equal:4096 --methods trl trl-kept flat budget --name sft-full-rows"

# Where there is little to gain: small batches, equal rows, a model that keeps no GPU busy
within 60 bash -c "bench dpo --model llama-3.2-1b --tuning lora --max-length 1024 --batches 3 --rounds 2 \
    --batch-size 1 2 4 --name crossover-small-batches --lengths $(rows pref_ultrafeedback_1000 uniform:60-1000) equal:512"
within 40 bash -c "bench dpo --model tiny --max-length 1024 --batches 4 --rounds 3 --name crossover-host-bound \
    --batch-size 8 --lengths $(rows pref_ultrafeedback_1000 uniform:60-1000) equal:128"

echo "--- $SECONDS s in all; results in $out"
exit $failed
