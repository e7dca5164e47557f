#!/usr/bin/env bash
# Seconds per epoch of MMoE at torch-rechub's sizes, ours and theirs in turn, with nothing else running:
# docs/results/tables/speed.sh [FOLDER], after run.sh, with PEER as there. Then: python docs/results/tables/table.py FOLDER
set -euo pipefail
out=${1:-runs/tables}
here=$(dirname "$0")
export OMP_NUM_THREADS=${THREADS:-1}
for pair in 1 2 3 4 5; do
  comet-moe train table --set data.path="$out/data/census/train.parquet" \
    --set data.options.validation="$out/data/census/validation.parquet" --set data.options.test="$out/data/census/test.parquet" \
    --set "data.options.targets=[income_50k,never_married]" --set training.threads=$OMP_NUM_THREADS --set gate=softmax \
    --set model.experts=8 --set "model.units=[32]" --set model.embedding=8 --set "model.head=[8]" --set model.dropout=0 \
    --set training.epochs=2 --set training.learning_rate=1e-3 --set training.schedule=constant \
    --out "$out/speed/ours-$pair" --resume
  "$PEER" "$here/peer.py" "$out/data/census" "$out/speed/peer-$pair" --epochs 2 --threads $OMP_NUM_THREADS
done
