#!/usr/bin/env bash
# MovieLens at full size: docs/results/movielens/run.sh DATA [FOLDER] [STUDIES] [SEEDS] [WORKERS] [GATES]
# DATA has the folder movielens-1m; run it again to resume, or with more SEEDS to add some. With GATES, such as dense,comet, the
# other gates wait; give STUDIES that have them.
set -euo pipefail
source "$(dirname "$0")/../seeds.sh"
data=$1 out=${2:-studies/movielens} studies=${3:-"rate-1.5e-4 rate-4e-4 softmax-cost per-task-cost alpha-0.1"} seeds=${4:-2} workers=${5:-2}
only=${6:+--only-gates $6}
study() {  # name, gates, settings
  local name=$1 gates=$2 settings=()
  shift 2
  for setting in "data.path=$data/movielens-1m" data.split=authors training.threads=1 "$@"; do settings+=(--set "$setting"); done
  # shellcheck disable=SC2046,SC2086  # options are words
  comet-moe ablate movielens "${settings[@]}" --gates "$gates" --workers "$workers" --out "$out/$name" \
    $(seeds_options "$out/$name" "$seeds") $only
}
for name in $studies; do
  case $name in
    rate-1.5e-4) study "$name" dense,comet+,topk,comet,dselect,topk+,hash+,hash,softmax training.patience=10 ;;
    rate-4e-4) study "$name" dense,softmax,comet+,dselect,comet,topk,topk+,hash+,hash,dense-per-task \
      training.learning_rate=4e-4 training.patience=5 ;;
    softmax-cost) study "$name" dense training.learning_rate=4e-4 training.patience=5 gates.dense.k=6 ;;  # as costly as Softmax
    per-task-cost)  # one expert for each task, together as costly as COMET
      study "$name" dense-per-task training.learning_rate=4e-4 training.patience=5 gates.dense-per-task.k=3 ;;
    alpha-0.1) study "$name" comet+,dense,dense-per-task training.patience=10 loss.alpha=0.1 ;;
    *) echo "there is no study $name" >&2; exit 2 ;;
  esac
done
