#!/usr/bin/env bash
# Decode speed on a machine with a GPU, for shapes that llama.cpp was measured with (see results/).
#   OUT=folder bash bench/gpu_speed.sh [flash|qwen|prompt|handoff|long|adapt|all]
# A part loads its model once, measures every size of the cache in windows of one token, predictions
# from slices first, and leaves one file of records in $OUT. Routing 0,0 is uniform, as made-up
# weights route in llama.cpp: half the slots are then half the hits. Each line of a table is one arm.
set -euo pipefail
OUT=${OUT:?give a folder for the records}
strata() { python3 -m strata.cli "$@"; }
flash=(--synthetic qwen4_exp-125b:IQ3_S --device cuda --context 1024)
qwen=(--synthetic qwen3-30b-a3b:Q4_K_M --device cuda --context 1024)
short=(--window 1 --at "${AT:-900}" --prompts "${PROMPTS:-3}" --tokens "${TOKENS:-64}" --rounds 2
    --locality 0,0)

flash() { # 24,576 experts: all, half, a quarter, a tenth, none
    strata bench "${flash[@]}" "${short[@]}" --slots "${SLOTS:-24576,12288,6144,2458,0}" \
        --arms "${ARMS:-off}" ${MORE---predict} --json "$OUT/flash.json"
}
qwen() { # 6,144 experts: all, half, none
    strata bench "${qwen[@]}" "${short[@]}" --slots "${SLOTS:-6144,3072,0}" \
        --arms "${ARMS:-off}" ${MORE---predict} --json "$OUT/qwen.json"
}
prompt() { # 512 tokens with all experts in RAM, 4,096 with a tenth of them in VRAM
    python3 bench/gpu_prompt.py synthetic:qwen4_exp-125b:IQ3_S --json "$OUT/prompt.json"
}
handoff() { # what a layer's ring, wait and answer cost by themselves
    python3 bench/handoff.py --json "$OUT/handoff.json"
}
adapt() { # real locality: fixed cache against the adaptive one, 10 % of the experts
    strata bench "${flash[@]}" --window 1 --prompts 4 --tokens 100 --rounds 2 \
        --expert-cache 2458 --fresh --arms "fixed=adapt-swaps:0,adaptive=adapt-swaps:96" \
        --json "$OUT/adapt.json"
}
long() { # windows at 30,000 tokens
    local flash=(--synthetic qwen4_exp-125b:IQ3_S --device cuda)
    strata bench "${flash[@]}" --window 1 --at 30000 --prompts 2 --tokens 50 --rounds 2 \
        --locality 0,0 --slots 6144 --arms off,defer --json "$OUT/long.json"
}

case "${1:-all}" in
    all) flash; qwen; prompt; handoff ;;
    *) "$1" ;;
esac
