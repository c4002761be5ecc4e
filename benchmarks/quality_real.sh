#!/bin/sh
# Quality within a time budget of a real model (BASS, figures 3 to 5): HumanEval's 164 problems and the first 200 of MBPP, plain and by
# the chat template, and summaries, by n. quality_tables.py makes docs/measurements/quality.md show whatever has come to its end.
#
#   benchmarks/quality_real.sh [--minutes N] MODEL HUMANEVAL MBPP [DIRECTORY]   stopped, it goes on where it was
#
# MODEL is SmolLM2-135M-Instruct as a directory, the sets are .jsonl or .jsonl.gz. Summaries are a set where SUMMARIES names their file,
# which summaries.py makes of a package. Hours in all, so the runs that say most come first;
# with --minutes it stops after so many, in the middle of a run too, and exits with 3 while there is more to do.
# ROWS, SETS and DRAFT choose other numbers of samples, sets and drafters. Leave the machine alone: runs are timed.
set -eu
ends=
if [ "${1:-}" = --minutes ]; then
  ends=$(($(date +%s) + $2 * 60))
  shift 2
fi
model=$1 humaneval=$2 mbpp=$3 out=${4:-build/quality-real}
shoal=${SHOAL:-shoal}
budgets=0.25,0.5,0.75,1,1.5,2,3,4,6,8,12,inf

bounded() { # runs a command until the time is over, which ends it as Ctrl-C does
  [ -n "$ends" ] || { "$@"; return; }
  left=$((ends - $(date +%s)))
  [ "$left" -gt 0 ] || return 130
  env --default-signal=INT timeout --preserve-status --signal=INT --kill-after=60 "$left" "$@"
}

for set in ${SETS:-${SUMMARIES:+summaries} humaneval humaneval-chat mbpp mbpp-chat}; do
  tokens=256
  case $set in
    summaries)
      asked="summarize --data ${SUMMARIES:?the file that summaries.py made} --chat"
      tokens=96
      ;;
    humaneval*) asked="humaneval --data $humaneval" ;;
    *) asked="mbxp --data $mbpp --limit 200" ;;
  esac
  case $set in *-chat) asked="$asked --chat" ;; esac
  for n in ${ROWS:-8 1 16 4 32}; do
    [ ! -e "$out/$set-$n/summary.json" ] || continue
    methods=plain,batched
    [ "$n" -ne 8 ] || methods=plain,plain-single,single,batched
    code=0
    bounded $shoal eval $asked --model "$model" --draft "${DRAFT:-self:int4}" --methods $methods -n "$n" --temperature 0.2 \
      --top-p 0.95 --max-new-tokens $tokens --seed 1 --time-budget $budgets --output "$out/$set-$n" || code=$?
    if [ "$code" -eq 130 ] && [ -n "$ends" ]; then
      echo "time is over in $set, n = $n: the same command goes on" >&2
      exit 3
    fi
    [ "$code" -eq 0 ] || exit "$code"
  done
done
