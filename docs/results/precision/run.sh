#!/usr/bin/env bash
# COMET in float32 and in bfloat16, three seeds: docs/results/precision/run.sh DATA [FOLDER], with the venv active. DATA has the
# folder movielens-100k. One thread each; run it again to resume. Then: python docs/results/precision/table.py FOLDER
set -euo pipefail
data=$1
out=${2:-runs/precision}
export OMP_NUM_THREADS=1
for seed in 0 1 2; do
  for precision in float32 bfloat16; do
    common="--set gate=comet --set training.precision=$precision --set training.threads=1 --set seed=$seed --resume"
    echo "comet-moe train multidigits $common --out $out/multidigits/$precision-$seed"
    echo "comet-moe train movielens-100k --set data.path=$data/movielens-100k --set training.epochs=10 $common" \
      "--out $out/movielens-100k/$precision-$seed"
  done
done | xargs -P "${PARALLEL:-2}" -I {} bash -c '{} > /dev/null || echo "failed: {}" >&2'
