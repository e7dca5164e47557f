# For `source`: options of `comet-moe ablate` that start a study with a number of seeds, resume it, or bring it to that number.
seeds_options() {  # folder of the study, number of seeds
  local had=$2
  [ ! -e "$1/study.json" ] || had=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["trials"])' "$1/study.json")
  if ((had < $2)); then echo "--add-seeds $(($2 - had))"; else echo "--seeds $had --resume"; fi
}
