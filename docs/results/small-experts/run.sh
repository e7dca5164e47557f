#!/usr/bin/env bash
# Small experts on MNIST with Fashion-MNIST: docs/results/small-experts/run.sh DATA [FOLDER] [SEEDS] [WORKERS]
# DATA has the folders mnist and fashion-mnist; run it again to resume.
set -euo pipefail
data=$1 out=${2:-studies/small-experts} seeds=${3:-3} workers=${4:-2}
study() {  # name, gates, settings
  local name=$1 gates=$2 settings=()
  shift 2
  for setting in "data.path=$data" data.options.{train_size=60000,validation_size=10000,test_size=10000} \
    training.{threads=1,epochs=100,patience=10} gates.comet.{k=1,information=1,warmup_epochs=3} \
    gates.switch.warmup_epochs=3 model.filters='[2,4]' model.units='[12]' training.learning_rate=2e-3 "$@"; do
    settings+=(--set "$setting")
  done
  comet-moe ablate mnist-fashion "${settings[@]}" --gates "$gates" --seeds "$seeds" --workers "$workers" --out "$out/$name" --resume
}
study filters-2 dense,switch,comet gates.dense.k=1
study filters-2-twice dense gates.dense.k=2  # a dense network of twice the cost
