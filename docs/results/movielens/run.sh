#!/usr/bin/env bash
# MovieLens at full size, every gate: docs/results/movielens/run.sh DATA [FOLDER], with the venv active. DATA has the
# folder movielens-1m. GATES, RATES, SEEDS, ALPHAS and PATIENCE choose; PARALLEL runs at a time (2), one thread each; run it
# again to resume.
set -euo pipefail
data=$1
out=${2:-runs/movielens}
export OMP_NUM_THREADS=1
for seed in ${SEEDS:-0}; do
  for alpha in ${ALPHAS:-0.9}; do
    for rate in ${RATES:-1e-4 2e-4 4e-4}; do
      for gate in ${GATES:-dense softmax hash hash+ topk topk+ dselect comet comet+}; do
        line="comet-moe train movielens --set data.path=$data/movielens-1m --set data.split=authors --set gate=$gate"
        line+=" --set training.learning_rate=$rate --set loss.alpha=$alpha --set training.patience=${PATIENCE:-25}"
        echo "$line --set training.threads=1 --set seed=$seed --out $out/$gate-$rate-$alpha-$seed --resume"
      done
    done
  done
done | xargs -P "${PARALLEL:-2}" -I {} bash -c '{} > /dev/null 2>> '"$out.log"' || echo "failed: {}" >&2'
