#!/usr/bin/env bash
# Tokens per second of 40 steps of each model / those of the dense one: docs/results/causal_lm/speed.sh TEXT, with the venv
# active and nothing else running. A search takes the first half of the steps, as in run.sh.
set -euo pipefail
export OMP_NUM_THREADS=1
dense=
for gate in dense dense-wide topk sigmoid hash hash+ comet comet+ relu; do
  speed=$(python examples/causal_lm.py --data "$1" --gate "$gate" --steps 40 --json 2> /dev/null |
    python -c 'import json, sys; print(json.load(sys.stdin)["tokens_per_second"])')
  dense=${dense:-$speed}
  python -c "print(f'| $gate | {$speed / $dense:.2f} |')"
done
