#!/usr/bin/env bash
# What keeps the tasks of COMET apart? docs/results/multifashionmnist/controls.sh DATA [FOLDER] [WORKERS]
# DATA has the folder fashion-mnist; run it again to resume. Then: python docs/results/multifashionmnist/table.py FOLDER
set -euo pipefail
data=$1 out=${2:-studies/multifashionmnist} workers=${3:-2}
settings=()
for setting in "data.path=$data/fashion-mnist" data.any_size=true data.options.train_size=4000 \
  data.options.validation_size=2000 data.options.test_size=4000 training.batch_size=128 training.learning_rate=1e-3 \
  training.epochs=40 training.patience=5 training.threads=1; do settings+=(--set "$setting"); done
comet-moe ablate multifashionmnist "${settings[@]}" --set loss.balance=together --set gate.information=0.1 --gates comet \
  --seeds 5 --workers "$workers" --out "$out/together" --resume
