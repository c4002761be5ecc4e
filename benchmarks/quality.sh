#!/bin/sh
# Quality within a time budget, of the bundled pair on 200 problems it was not trained on: quality_tables.py --pair keeps and shows it.
#
#   benchmarks/quality.sh [DIRECTORY]      build/quality without one; stopped, it goes on where it was
#
# The two runs with a seed are timed: leave the machine alone. The two without compare laws, and need not be timed.
set -eu
out=${1:-build/quality}
shoal=${SHOAL:-shoal}
budgets=0.005,0.01,0.015,0.02,0.03,0.04,0.05,0.075,0.1,0.15,0.2,0.3,0.4,0.5,0.75,1,inf

for temperature in 0.2 0.8; do
  common="functions -n 8 --temperature $temperature --top-p 0.95 --max-new-tokens 128"
  $shoal eval $common --methods plain,plain-single,single,batched --seed 1 --time-budget $budgets --output "$out/seeded-$temperature"
  $shoal eval $common --methods plain,batched --output "$out/fresh-$temperature"
done
