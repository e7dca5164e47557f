#!/usr/bin/env bash
# The runs of docs/results/causal_lm: docs/results/causal_lm/run.sh TEXT [FOLDER], from the repository's root, with the
# venv active. PARALLEL runs at a time (2), one thread each; run it again to resume.
# Then: python docs/results/causal_lm/table.py FOLDER
set -euo pipefail
text=$1
out=${2:-runs/causal_lm}
mkdir -p "$out"
export OMP_NUM_THREADS=1
gates="dense dense-wide topk sigmoid hash hash+ comet comet+ relu"
for seed in 0 1 2; do
  for gate in $gates; do
    [ -s "$out/$gate-$seed.json" ] || echo "$gate $seed"
  done
done | xargs -P "${PARALLEL:-2}" -L 1 bash -c '
  python examples/causal_lm.py --data '"$text"' --gate $0 --seed $1 --steps '"${STEPS:-500}"' --json \
    > '"$out"'/$0-$1.part 2>> '"$out"'.log && mv '"$out"'/$0-$1.part '"$out"'/$0-$1.json || echo "failed: $0 $1" >&2'
