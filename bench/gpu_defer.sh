#!/usr/bin/env bash
# What deferral and state repair bring on a GPU: off, off once more (the noise floor), check, defer,
# below auto, repair, repair below auto, taking turns on one engine, with 16, 8 and 4 CPU threads.
#   OUT=folder bash bench/gpu_defer.sh [low|long|steps|link]
# Flash-Next shape, 1,404 of 24,576 experts cached, windows of one token. A part loads the model once
# (about a minute). low: at 200 tokens; long: at 30,000 (states are made up: speed only); steps: time
# of each part of a layer, off and with repair; link: the same arms with a PCIe share.
set -euo pipefail
OUT=${OUT:?give a folder for the records}
model=(--synthetic "${MODEL:-qwen4_exp-125b:IQ3_S}" --device "${DEVICE:-cuda}")
arms=${ARMS:-off,floor,check,defer,below,repair,repair-below}
protocol=(--window 1 --prompts "${PROMPTS:-4}" --tokens "${TOKENS:-10}" --rounds "${ROUNDS:-2}")

part() { # NAME CONTEXT SHARE arguments of strata bench
    local name=$1 context=$2 share=$3
    shift 3
    python3 -m strata.cli bench "${model[@]}" --expert-cache "${CACHE:-1404}" --context "$context" \
        --pcie-frac "$share" "${protocol[@]}" --json "$OUT/defer-$name.json" "$@"
}
low() { part low 1024 0 --at 200 --threads "${THREADS:-16,8,4}" --arms "$arms" --no-layers; }
long() { part long 30720 0 --at 30000 --threads "${THREADS:-16,8,4}" --arms "$arms" --no-layers; }
steps() { part steps 30720 0 --at 200,30000 --arms off,defer,repair; }
link() {
    part link 1024 "${SHARE:-0.25}" --at 200 --threads "${THREADS:-16,8,4}" --arms "$arms" \
        --no-layers
}

"${1:?low, long, steps or link}"
