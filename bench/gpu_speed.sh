#!/usr/bin/env bash
# Decode speed on a machine with a GPU, for shapes that llama.cpp was measured with (see results/).
#   OUT=folder bash bench/gpu_speed.sh [flash|qwen|doctor|long|all]
# Windows of one token. Routing 0,0 is uniform, as made-up weights route in llama.cpp: half the slots
# are then half the hits. Each line of a table is one arm; the records in $OUT say the rest.
set -euo pipefail
OUT=${OUT:?give a folder for the records}
strata() { python3 -m strata.cli "$@"; }
flash=(--synthetic qwen4_exp-125b:IQ3_S --device cuda --context 1024)
qwen=(--synthetic qwen3-30b-a3b:Q4_K_M --device cuda --context 1024)
quick=(--prompts 4 --tokens 100 --rounds 2)

flash() { # 24,576 experts: none, a tenth, a quarter, half, all
    for slots in ${SLOTS:-0 2458 6144 12288 24576}; do
        strata bench "${flash[@]}" "${quick[@]}" --expert-cache "$slots" --locality 0,0 \
            --arms "${ARMS:-off,defer}" --json "$OUT/flash-$slots.json"
    done
}
qwen() { # 6,144 experts: none, half, all
    for slots in ${SLOTS:-0 3072 6144}; do
        strata bench "${qwen[@]}" "${quick[@]}" --expert-cache "$slots" --locality 0,0 \
            --arms "${ARMS:-off}" --json "$OUT/qwen-$slots.json"
    done
}
doctor() { # predictions beside what is measured
    strata doctor "${qwen[@]}" --expert-cache 0 --check
    strata doctor "${qwen[@]}" --expert-cache 6144 --check
    strata doctor "${flash[@]}" --expert-cache 0 --check
}
adapt() { # real locality: fixed cache against the adaptive one, 10 % of the experts
    strata bench "${flash[@]}" "${quick[@]}" --expert-cache 2458 --fresh \
        --arms "fixed=adapt-swaps:0,adaptive=adapt-swaps:96" --json "$OUT/adapt.json"
}
long() {
    strata bench --synthetic qwen4_exp-125b:IQ3_S --device cuda --long --tokens 50 --rounds 1 \
        --expert-cache 6144 --arms off,defer --json "$OUT/long.json"
}

case "${1:-all}" in
    all) flash; qwen; adapt; doctor ;;
    *) "$1" ;;
esac
