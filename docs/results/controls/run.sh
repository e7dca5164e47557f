#!/usr/bin/env bash
# What of local search's gain is the search? docs/results/controls/run.sh DATA [FOLDER] [SEEDS] [WORKERS]
# DATA has the folder movielens-1m; run it again to resume, or with more SEEDS to add some.
# The gates as they are, with and without search: ../ablation.
set -euo pipefail
source "$(dirname "$0")/../seeds.sh"
data=$1 out=${2:-studies/controls} seeds=${3:-30} workers=${4:-2}
study() {  # name, gates, settings
  local name=$1 gates=$2 settings=()
  shift 2
  for setting in "data.path=$data/movielens-1m" data.split=authors training.threads=1 "$@"; do settings+=(--set "$setting"); done
  # shellcheck disable=SC2046  # options are words
  comet-moe ablate movielens-200k "${settings[@]}" --gates "$gates" --workers "$workers" --out "$out/$name" \
    $(seeds_options "$out/$name" "$seeds")
}
study dense dense                                                                     # no mixture
study warmup hash,hash+,topk,topk+,comet,comet+ gate.warmup_epochs=5                  # a soft phase, without and with search
study annealed hash+,topk+,comet+ search.schedule=annealed                            # a search that is soft for longer
study fixed hash+,topk+,comet+ search.schedule=annealed search.lr_factor=1e-9         # the same, and U is not learned
