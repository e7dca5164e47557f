#!/usr/bin/env bash
# Small experts on MNIST with Fashion-MNIST: docs/results/small-experts/run.sh DATA [FOLDER] [NEW_SEEDS] [WORKERS]
# DATA has the folders mnist and fashion-mnist; run it again to resume, or with more NEW_SEEDS to add some.
set -euo pipefail
source "$(dirname "$0")/../seeds.sh"
data=$1 out=${2:-studies/small-experts} new_seeds=${3:-5} workers=${4:-2}
study() {  # name, number of seeds, gates, settings
  local name=$1 seeds=$2 gates=$3 settings=()
  shift 3
  for setting in "data.path=$data" data.options.{train_size=60000,validation_size=10000,test_size=10000} \
    training.{threads=1,epochs=100,patience=10} gates.comet.{k=1,information=1,warmup_epochs=3} \
    gates.switch.warmup_epochs=3 model.filters='[2,4]' model.units='[12]' training.learning_rate=2e-3 "$@"; do
    settings+=(--set "$setting")
  done
  # shellcheck disable=SC2046  # options are words
  comet-moe ablate mnist-fashion "${settings[@]}" --gates "$gates" --workers "$workers" --out "$out/$name" \
    $(seeds_options "$out/$name" "$seeds")
}
study filters-2 3 dense,switch,comet gates.dense.k=1
study filters-2-twice 3 dense gates.dense.k=2                      # a dense network of twice the cost
study new-seeds "$new_seeds" dense,comet gates.dense.k=1 seed=3    # the comparison again, from seed 3 on
study same-cost 3 dense gates.dense.k=1 seed=3 model.filters='[2,6]'   # a dense network of a few more operations than COMET
