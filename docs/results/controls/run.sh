#!/usr/bin/env bash
# What of local search's gain is the search? docs/results/controls/run.sh DATA [FOLDER] [FAMILIES] [SEEDS] [WORKERS]
# DATA has the folder movielens-1m. Each family of gates (hash, topk, comet) has six networks; run it again to resume.
set -euo pipefail
data=$1 out=${2:-studies/controls} families=${3:-"hash topk comet"} seeds=${4:-10} workers=${5:-2}
study() {  # name, gates, settings
  local name=$1 gates=$2 settings=()
  shift 2
  for setting in "data.path=$data/movielens-1m" data.split=authors training.threads=1 "$@"; do settings+=(--set "$setting"); done
  comet-moe ablate movielens-200k "${settings[@]}" --gates "$gates" --seeds "$seeds" --workers "$workers" --out "$out/$name" --resume
}
for gate in $families; do
  study "$gate" "$gate,$gate+"                                             # the paper's schedule
  study "$gate-warmup" "$gate,$gate+" gate.warmup_epochs=5                 # the same soft phase, without and with search
  study "$gate-annealed" "$gate+" search.schedule=annealed                 # a search with a soft phase
  study "$gate-fixed" "$gate+" search.schedule=annealed search.lr_factor=1e-9  # the same, and U is not learned
done
