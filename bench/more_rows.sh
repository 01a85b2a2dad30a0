#!/usr/bin/env bash
# Rows of docs/benchmarks.md that are not those of bench_table.py, one after the other, each with a
# time limit; what a row prints goes to OUT/NAME.txt, its last line to the terminal.
#
#     bash bench/more_rows.sh SET OUT [NAME ...]
#
# SET: cards (two GPUs), sharding (two GPUs), disk (one GPU), images (one GPU). NAME: these alone.
set -u
cd "$(dirname "$0")/.." || exit 2
set_name=$1 out=$2
shift 2
chosen=("$@")
mkdir -p "$out"

row() { # NAME LIMIT_S COMMAND ...
    local name=$1 limit_s=$2 began_s=$SECONDS
    shift 2
    if [ ${#chosen[@]} -gt 0 ] && [[ " ${chosen[*]} " != *" $name "* ]]; then return; fi
    timeout "$limit_s" "$@" > "$out/$name.txt" 2>&1
    local code=$?
    echo "$name: code $code, $((SECONDS - began_s)) s: $(grep -v '^$' "$out/$name.txt" | tail -n 1 | cut -c 1-900)"
}

two() { # NAME LIMIT_S SCRIPT ...
    row "$1" "$2" torchrun --nproc_per_node=2 "${@:3}"
}

case $set_name in
cards)
    row flux 90 python bench/bench_flux.py --cards 2 --budget-gib 24 --rows 2 --largest 4 --steps 8
    same=(--shape 3b --batch 32 --steps 20)
    row 3b 90 python bench/bench_gpu.py "${same[@]}" --cards 2
    for params in full shard; do
        for gradients in gpu_reduce cpu_reduce; do
            two "3b-$params-$gradients" 90 bench/bench_gpu.py "${same[@]}" --params $params --gradients $gradients
        done
    done
    NCCL_P2P_DISABLE=1 two 3b-without-peers 90 bench/bench_gpu.py --shape 3b --batch 32 --steps 6
    ;;
sharding)
    row encoders 60 python bench/encode_rates.py --methods none int8 fp8
    two 3b-bare 60 bench/bench_fsdp.py --shape 3b --batch 8 --resident
    row 3b 90 python bench/bench_fsdp.py --shape 3b --batch 8 --ours
    row 3b-ddp 90 python bench/bench_fsdp.py --shape 3b --batch 8 --ours --set fsdp.sharding_strategy=NO_SHARD
    two 7b-lora-bare 90 bench/bench_fsdp.py --shape 7b --batch 4 --rank 16 --resident
    row 7b-lora 90 python bench/bench_fsdp.py --shape 7b --batch 4 --rank 16 --ours
    row compression 180 python bench/compression.py --methods bf16 int8 qsgd --seeds 1 --out "$out/compression"
    ;;
disk)
    row 1.5b 60 python bench/bench_gpu.py --shape 1.5b --batch 32 --steps 6
    row 1.5b-disk 120 python bench/bench_gpu.py --shape 1.5b --batch 32 --steps 6 --host-gib 12 --disk-path "$out"
    row 70b-disk 240 python bench/bench_lora.py --shape 70b --frozen nf4-double --sequence 4096 --batches 2 --budget-gib 23 --host-gib 20 --steps 2
    ;;
images)
    for budget_gib in 8 16 23; do
        row "flux-$budget_gib" 60 python bench/bench_flux.py --budget-gib "$budget_gib" --steps 8
    done
    row flux-full 150 python bench/bench_flux.py --budget-gib 23 --method full --states 8bit --steps 20
    ;;
*)
    echo "there is no set $set_name: cards, sharding, disk, images" >&2
    exit 2
    ;;
esac
