#!/usr/bin/env bash
# The audits of docs/results/audit: docs/results/audit/run.sh TEXT [FOLDER], from the repository's root, with the venv active.
# Trains three models of examples/causal_lm.py and audits each on the tenth of the text that was held out; run it again to resume.
# QUICK=1 trains the example's small models, in another folder.
set -euo pipefail
text=$1 out=${2:-runs/audit}
mkdir -p "$out"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
sizes=(--lr 1e-3 --steps 400) length=128
[ -z "${QUICK:-}" ] || { sizes=(--lr 2e-3 --steps 1000 --quick); length=32; }
tail -c $(($(stat -c %s "$text") / 10)) "$text" > "$out/held-out.txt"
for gate in topk hash comet; do
  [ -s "$out/$gate.result.json" ] || {
    python examples/causal_lm.py --data "$text" --gate $gate "${sizes[@]}" --save "$out/$gate" --json > "$out/$gate.part"
    mv "$out/$gate.part" "$out/$gate.result.json"
  }
  time python -m comet_moe audit "$out/$gate" --data "$out/held-out.txt" --length $length --json \
    -o "$out/$gate.html" > "docs/results/audit/$gate.json"
done
python docs/results/audit/draw.py
