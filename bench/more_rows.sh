#!/usr/bin/env bash
# Rows of docs/benchmarks.md that are not those of bench_table.py, one after the other, each with a
# time limit; what a row prints goes to OUT/NAME.txt, its last line to the terminal.
#
#     bash bench/more_rows.sh SET OUT [NAME ...]
#
# SET: cards, sharding, peers (two GPUs), disk, images (one GPU). NAME: these alone.
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
    same=(--shape 3b --batch 32 --steps 20)
    row 3b 110 python bench/bench_gpu.py "${same[@]}" --cards 2
    two 3b-full-gpu_reduce 110 bench/bench_gpu.py "${same[@]}"
    row flux 100 python bench/bench_flux.py --cards 2 --budget-gib 24 --rows 2 --largest 4 --steps 8
    two 3b-shard-gpu_reduce 110 bench/bench_gpu.py "${same[@]}" --params shard
    two 3b-full-cpu_reduce 110 bench/bench_gpu.py "${same[@]}" --gradients cpu_reduce
    two 3b-shard-cpu_reduce 110 bench/bench_gpu.py "${same[@]}" --params shard --gradients cpu_reduce
    low=(--shape 0.5b --batch 16 --steps 20 --learning-rate 1e-5)
    row losses-cards 100 python bench/bench_gpu.py "${low[@]}" --cards 2 & # beside each other: losses alone
    for params in full shard; do
        for gradients in gpu_reduce cpu_reduce; do
            row "losses-$params-$gradients" 100 torchrun --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 \
                bench/bench_gpu.py "${low[@]}" --params $params --gradients $gradients &
        done
    done
    wait
    NCCL_P2P_DISABLE=1 two 3b-without-peers 60 bench/bench_gpu.py --shape 3b --batch 32 --steps 6
    ;;
sharding)
    two flux-ddp 60 bench/bench_flux.py --engine ddp --budget-gib 24 --rows 2 # does not fit
    two flux-fsdp-offload 90 bench/bench_flux.py --engine fsdp --cpu-offload --budget-gib 24 --rows 2
    row encoders 60 python bench/encode_rates.py --methods none int8 fp8
    two 3b-bare 80 bench/bench_fsdp.py --shape 3b --batch 8 --resident --steps 20
    row 3b 130 python bench/bench_fsdp.py --shape 3b --batch 8 --ours --steps 20
    replicas=(--shape 3b --batch 8 --ours --steps 20 --set fsdp.sharding_strategy=NO_SHARD)
    row 3b-ddp 90 python bench/bench_fsdp.py "${replicas[@]}"
    row 3b-ddp-int8 90 python bench/bench_fsdp.py "${replicas[@]}" --set comm.compress=int8
    two 7b-lora-bare 90 bench/bench_fsdp.py --shape 7b --batch 4 --rank 16 --resident --steps 20
    row 7b-lora 120 python bench/bench_fsdp.py --shape 7b --batch 4 --rank 16 --ours --steps 20
    for method in bf16 int8 qsgd; do # beside each other: they are compared in losses and bytes
        row "perplexity-$method" 150 python bench/compression.py --methods $method --plain \
            --seeds 1 --profile 0 --out "$out/perplexity-$method" &
    done
    wait
    slow=(bench/compression.py --plain --seeds 1 --steps 60 --profile 0)
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 \
        row sockets 180 python "${slow[@]}" --methods bf16 int8 qsgd --out "$out/sockets"
    ;;
disk)
    states=(--shape 1.5b --batch 32 --budget-gib 12 --chunk-rows 8 --learning-rate 1e-5 --steps 6)
    row 1.5b 60 python bench/bench_gpu.py "${states[@]}"
    row 1.5b-disk 120 python bench/bench_gpu.py "${states[@]}" --host-gib 10 --disk-path "$out"
    row 70b-40-disk 150 python bench/bench_lora.py --shape 70b --layers 40 --frozen nf4-double --sequence 4096 --batches 2 --budget-gib 23 --host-gib 10 --steps 2
    row 70b-disk 240 python bench/bench_lora.py --shape 70b --frozen nf4-double --sequence 4096 --batches 2 --budget-gib 23 --host-gib 20 --steps 2
    ;;
images)
    for budget_gib in 8 16 23; do
        row "flux-$budget_gib" 60 python bench/bench_flux.py --budget-gib "$budget_gib" --steps 8
    done
    row flux-full 150 python bench/bench_flux.py --budget-gib 23 --method full --states 8bit --steps 20
    ;;
peers) # all beside each other: they are compared in losses, not in seconds
    same=(--size 256 --rows 2 --steps 200)
    row losses-ours 200 python bench/bench_flux.py "${same[@]}" --budget-gib 23 &
    row losses-ours-nf4 200 python bench/bench_flux.py "${same[@]}" --budget-gib 12 --frozen nf4-double &
    row losses-ours-cards 200 python bench/bench_flux.py "${same[@]}" --budget-gib 24 --cards 2 &
    for engine in ddp ddp-4bit fsdp; do
        row "losses-$engine" 200 torchrun --nproc_per_node=2 --rdzv-backend=c10d \
            --rdzv-endpoint=localhost:0 bench/bench_flux.py "${same[@]}" --engine "$engine" &
    done
    wait
    ;;
*)
    echo "there is no set $set_name: cards, sharding, peers, disk, images" >&2
    exit 2
    ;;
esac
