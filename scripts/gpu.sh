#!/usr/bin/env bash
# Runs tests and benchmarks on one GPU, in less than ten minutes. The most informative steps run first. docs/gpu.md says
# what to expect:
#
#     scripts/gpu.sh FOLDER [ARCHIVE.tar.gz]
#
# It writes the environment and the reports of the tests into the folder, and for each benchmark NAME.json, NAME.md and
# NAME.png, each as soon as it is there. If you name an archive, it has all of this after every step.
#
#     WHEELS=FOLDER        installs the wheels of this folder first, without a network, into a folder of their own
#     STEPS="5 6 7"        runs these steps only (default: all)
#     SECONDS_FOR_ALL=570  limits the time for all steps; the last ones may be left out
#     EIGHT=tiny ONE=tiny  takes other shapes, for a smaller GPU, or to rehearse on a CPU
#
# The package need not be installed. Weights are random and made on the GPU. scripts/benchmark/lengths has the lengths of
# UltraFeedback, HH and GSM8K. Those of P3 ("like:p3") are generated, and spread like the real ones.
set -uo pipefail
out=$(mkdir -p "${1:?name a folder for the results}" && cd "$1" && pwd)
archive=${2:+$(realpath "$2")}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore TQDM_DISABLE=1 HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false PYTORCH_ALLOC_CONF=expandable_segments:True
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
eight=${EIGHT:-llama-3-8b} one=${ONE:-llama-3.2-1b} steps=${STEPS:-1 2 3 4 5 6 7 8 9} seconds=${SECONDS_FOR_ALL:-570}
lengths=scripts/benchmark/lengths failed=0

keep() { [[ -z $archive ]] || tar -czf "$archive" -C "$out" .; }

# within SECONDS COMMAND: run it for no longer than that, and no longer than is left for all
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
    keep
}

bench() { # SECONDS ARGUMENTS
    local limit=$1
    shift
    within "$limit" python3 -m scripts.benchmark "$@"
}

gpu_tests() { # SECONDS NAME ARGUMENTS
    local limit=$1 report="$out/$2.txt"
    shift 2
    within "$limit" python3 -m pytest -m gpu -q -p no:cacheprovider --maxfail=40 "$@" > >(tee "$report") 2>&1
}

step() { [[ " $steps " == *" $1 "* ]] && echo "=== step $1, after $SECONDS s"; }

all() {
    if [[ -n ${WHEELS:-} ]]; then
        site=$(mktemp -d)
        python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || return 1
        export PYTHONPATH="$PWD:$site"
    fi
    python3 - <<'PYTHON' || return 1
import importlib.util, sys
names = "torch transformers trl peft accelerate datasets numpy rich psutil pytest".split()
missing = [name for name in names if importlib.util.find_spec(name) is None]
sys.exit(f"not installed: {', '.join(missing)}. Put wheels of them into a folder, and name it in WHEELS." if missing else 0)
PYTHON
    {
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
        git log -1 --format="commit %H" 2>/dev/null
        python3 -c 'import json
from scripts.benchmark.environment import environment
print(json.dumps(environment(), indent=1))'
    } 2>&1 | tee "$out/environment.txt"

    step 1 && gpu_tests 110 tests tests/test_gpu.py

    # The claim: an 8B Llama, LoRA, gradient checkpointing as TRL has it, 8 pairs or rows of at most 1,024 tokens
    local claim=(--model "$eight" --tuning lora --batch-size 8 --max-length 1024 --output "$out")
    local ultrafeedback=$lengths/pref_ultrafeedback_1000.csv.gz
    step 2 && bench 200 dpo "${claim[@]}" --name dpo --methods trl flat shared budget trl-kept --batches 3 --rounds 2 \
        --lengths "$ultrafeedback" $lengths/pref_hh_harmless_1500.csv.gz
    step 3 && {
        bench 130 sft "${claim[@]}" --name sft --methods trl flat budget trl-kept --batches 4 --rounds 2 \
            --lengths like:p3 $lengths/sft_gsm8k_train_3000.csv.gz
        # Rows without anything to win, at the sizes for which others report tokens per second
        bench 80 sft --model "$eight" --tuning lora --batch-size 2 --max-length 4096 --output "$out" \
            --name sft-full-rows --methods trl trl-kept flat budget --batches 2 --rounds 2 --lengths equal:4096
    }
    step 4 && bench 80 --parts "$out"
    # PyTorch may choose the kernel by whether boundaries are one tensor: both, with the operators that computed them
    step 5 && bench 130 dpo "${claim[@]}" --name dpo-profile --profile --batches 1 --rounds 2 \
        --methods trl trl-two-boundaries flat shared --lengths "$ultrafeedback"
    step 6 && {
        bench 80 dpo --model "$one" --tuning lora --batch-size 1 2 4 --max-length 1024 --output "$out" \
            --name crossover-small-batches --batches 2 --rounds 2 --lengths "$ultrafeedback" equal:512
        bench 60 dpo --model tiny --batch-size 8 --max-length 1024 --output "$out" \
            --name crossover-host-bound --batches 3 --rounds 3 --lengths "$ultrafeedback" equal:128
    }
    step 7 && {
        local eight_at_a_time=()
        python3 -c 'import xdist' 2>/dev/null && eight_at_a_time=(-n 8)
        gpu_tests 200 architectures "${eight_at_a_time[@]}" tests/core/check/test_architectures.py tests/core/model/test_attention.py
    }
    # Decoder layers compiled one by one, beside eager ones; compiling takes a minute
    step 9 && bench 200 dpo "${claim[@]}" --name dpo-compiled --methods trl shared budget compiled --batches 2 --rounds 2 \
        --lengths "$ultrafeedback"
    # One flat batch on two GPUs, where there are as many
    local gpus
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    ((gpus > 1)) && step 8 && CUDA_VISIBLE_DEVICES=0,1 within 90 python3 -m torch.distributed.run --standalone \
        --nproc_per_node 2 -m tests.groups.sequence_counts > >(tee "$out/sequence.txt") 2>&1
    echo "=== $SECONDS s in all; results in $out${archive:+ and $archive}"
}

all > >(tee "$out/log.txt") 2>&1 || failed=1
keep
exit $failed
