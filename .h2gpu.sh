#!/bin/bash
# one GPU call
export PYTHONUNBUFFERED=1
P=python3
run() { t=$1; shift; echo "=== $*"; s=$(date +%s); timeout $t $P -m spec_compile.cli bench "$@" 2>&1 | grep -v Warning | cut -c1-330; echo "--- $(( $(date +%s) - s )) s"; }
run 28 launch --tokens 4096
run 32 eagle3 --tokens 32768 --cp 1 8 --ranks slowest --repeats 3 --budget 3 --json $OUT/e32.json
run 30 blocks --tokens 32768 --cp 1 4 --repeats 5 --json $OUT/blocks.json
run 45 eagle3 --tokens 131072 --cp 8 --ranks slowest --repeats 2 --budget 4 --splits ring --strategy all_gather --json $OUT/e128.json
